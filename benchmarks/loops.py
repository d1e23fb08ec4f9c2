"""Training loops that can be run a few steps at a time, so that several can take turns."""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from torch import Tensor, nn

from gpt import CLIP_NORM, GPT, LEARNING_RATE, WEIGHT_DECAY, batches, call_gpt, gpt_chunk
from lightning_mcore._mcore.cuda_graphs import delete_graphs, graphable_layers, make_te_graphs
from lightning_mcore._mcore.engine import clear_schedule_hooks

Around = Callable[[], AbstractContextManager[Any]]
"""Opens a context around a block of steps, in the thread that runs them."""


class TrainerLoop(pl.Callback):
    """A real ``trainer.fit`` in a thread of its own, which waits between blocks of steps.

    A block ends in ``on_train_batch_end``, so n steps hold n rounds of everything that the Trainer
    does in a loop. Only one thread runs at a time. ``depth`` calls are on the stack below the
    Trainer, as the scripts of others have them.
    """

    def __init__(
        self,
        strategy: Any,
        module: GPT,
        loader: Any,
        device: torch.device,
        precision: Any = "32-true",
        *,
        callbacks: Sequence[pl.Callback] = (),
        depth: int = 0,
        **options: Any,
    ) -> None:
        self.module = module
        self.losses: list[Tensor] = []
        self.keep_losses = False
        self._loader = loader
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._left = 0
        self._around: Around = nullcontext
        self._context: AbstractContextManager[Any] = nullcontext()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._fit, args=(depth,), daemon=True)
        self.trainer = pl.Trainer(
            accelerator=device.type if device.type == "cpu" else "gpu",
            devices=dist_size(),
            strategy=strategy,
            precision=precision,
            gradient_clip_val=CLIP_NORM,
            # The others before the one that waits for the next block.
            callbacks=[*callbacks, self],
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **options,
        )

    def start(self) -> None:
        """Runs until the first batch is due."""
        self._thread.start()
        self._wait()

    def run(self, steps: int, around: Around = nullcontext) -> None:
        """Runs ``steps`` optimizer steps."""
        self._left, self._around = steps * self.trainer.accumulate_grad_batches, around
        self._go.release()
        self._wait()

    def stop(self) -> None:
        """Lets ``fit`` come to its end, which may take one more step."""
        self.trainer.should_stop = True
        self._left, self._around = 1 + self.trainer.accumulate_grad_batches, nullcontext
        self._go.release()
        self._wait()
        self._thread.join()

    def run_alone(self, callback: pl.Callback) -> None:
        """Runs ``fit`` in this thread, to the end that ``callback`` sets, in place of all above."""
        self.trainer.callbacks = [callback if c is self else c for c in self.trainer.callbacks]
        self.trainer.fit(self.module, self._loader)

    def release(self) -> None:
        """Frees parameters, gradients and optimizer state, after which only ``stop`` may follow.

        Lightning's own strategies copy them all to the host when they end, which takes longer than
        a benchmark of a large model. Not for sharded models.
        """
        for optimizer in self.trainer.optimizers:
            optimizer.state.clear()
        for parameter in self.module.parameters():
            parameter.grad = None
            parameter.data = parameter.data.new_empty(0)

    def _wait(self) -> None:
        self._done.acquire()
        if self._error is not None:
            raise self._error

    def _fit(self, depth: int) -> None:
        if depth > 0:
            self._fit(depth - 1)
            return
        try:
            self.trainer.fit(self.module, self._loader)
        except BaseException as error:
            self._error = error
        finally:
            self._done.release()

    def _hand_over(self) -> None:
        self._context.__exit__(None, None, None)
        self._done.release()
        self._go.acquire()
        self._context = self._around()
        self._context.__enter__()

    def on_train_start(self, *_: Any) -> None:
        self._hand_over()

    def on_train_batch_end(self, _trainer: Any, _module: Any, outputs: Any, *_: Any) -> None:
        if self.keep_losses:
            self.losses.append(outputs["loss"].detach().clone())
        self._left -= 1
        if self._left == 0:
            self._hand_over()


class DirectLoop:
    """The same training written on the engine, without Lightning, as in Megatron-LM's train_step.

    Args:
        size: Of the model.
        stages: This rank's stages in pipeline order.
        fields: Of the engine's TransformerConfig: what the strategy gave its factory.
        switches: Fields of the engine's DDP config.
        weights: State dict of each chunk to start from; ``None``: as built.
        device: Of this rank.
        optimizer: Further fields of the engine's OptimizerConfig.
        micro_batch_size: Samples; ``None``: the whole batch, without a pipeline.
        chunk: Builds a chunk, like ``gpt_chunk``.
        call: Calls the model for losses, like ``call_gpt``.
        seed: Called with each stage before its chunk is built.
    """

    def __init__(
        self,
        size: Any,
        stages: Sequence[Any],
        fields: dict[str, Any],
        switches: dict[str, Any],
        weights: Sequence[dict[str, Any]] | None,
        device: torch.device,
        *,
        optimizer: Mapping[str, Any] = MappingProxyType({}),
        micro_batch_size: int | None = None,
        chunk: Callable[..., nn.Module] = gpt_chunk,
        call: Callable[[nn.Module, Tensor, Tensor], Tensor] = call_gpt,
        seed: Callable[[Any], None] = lambda stage: None,
    ) -> None:
        self._device = device
        self._size = size
        self._call = call
        self.losses: list[Tensor] = []
        self.keep_losses = False
        chunks: list[Any] = []
        for stage in stages:
            seed(stage)
            place = {"is_first": stage.is_first, "is_last": stage.is_last}
            with device:  # as Lightning calls configure_model, for equal first weights
                built = chunk(size, **place, vp_stage=stage.vp_stage, **fields)
            chunks.append(built.to(device))
        for built, state in zip(chunks, weights or (), strict=weights is not None):
            built.load_state_dict(state)
        self.config = config = copy.copy(chunks[0].config)
        if config.bf16:
            chunks = [Float16Module(config, built) for built in chunks]
        self.ddp_config = DistributedDataParallelConfig(**switches)
        with _capture_stream(config):
            self._chunks: list[Any] = [
                DistributedDataParallel(config, self.ddp_config, built, disable_bucketing=index > 0)
                for index, built in enumerate(chunks)
            ]
        if graph_impl(config) != "none":
            torch.cuda.synchronize()
        self._gathers_late = self.ddp_config.overlap_param_gather
        self._is_first_step = True
        for wrapped in self._chunks:
            wrapped.broadcast_params()
            if self._gathers_late:
                wrapped.disable_forward_pre_hook(param_sync=False)
        self.optimizer_config = OptimizerConfig(
            optimizer="adam",
            lr=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
            adam_beta1=0.9,
            adam_beta2=0.999,
            adam_eps=1e-8,
            clip_grad=CLIP_NORM,
            bf16=config.bf16,
            params_dtype=fields["params_dtype"],
            use_distributed_optimizer=self.ddp_config.use_distributed_optimizer,
            overlap_param_gather=self._gathers_late,
            **optimizer,
        )
        # No overrides: one parameter group with weight decay, as in configure_optimizers.
        self._optimizer = get_megatron_optimizer(
            self.optimizer_config, self._chunks, config_overrides={}
        )
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self._optimizer.scale_loss
        config.no_sync_func = None
        if self.ddp_config.overlap_grad_reduce:
            several = len(chunks) > 1
            no_syncs = [chunk.no_sync for chunk in self._chunks]
            config.no_sync_func = no_syncs if several else no_syncs[0]
            if several:
                config.grad_sync_func = [chunk.start_grad_sync for chunk in self._chunks]
        self._schedule = get_forward_backward_func()
        self._replicas = parallel_state.get_data_parallel_world_size()
        replica = parallel_state.get_data_parallel_rank()
        pipelined = parallel_state.get_pipeline_model_parallel_world_size() > 1
        self._micro_batch_size = micro_batch_size or (size.micro_batch if pipelined else size.batch)
        self._batches = iter(batches(size, replicas=self._replicas, replica=replica))
        self._capture_after = -1
        self._graphs: Any = None
        if graph_impl(config) == "full_iteration":
            from megatron.core.full_cuda_graph import FullCudaGraphWrapper

            self._schedule = self._graphs = FullCudaGraphWrapper(
                self._schedule, cuda_graph_warmup_steps=config.cuda_graph_warmup_steps
            )
        elif graph_impl(config) == "transformer_engine":
            # In the step in which the strategy does (lightning_mcore/graphs.py).
            self._capture_after = max(1, config.cuda_graph_warmup_steps)

    def run(self, steps: int, around: Around = nullcontext) -> None:
        """Runs ``steps`` steps."""
        with around():
            for _ in range(steps):
                self._step()

    def end(self) -> None:
        """Undoes what would outlive this loop: captured layers, which hold each other, and the
        config's ways from the chunks to the optimizer. No step may follow.
        """
        clear_schedule_hooks(self._chunks)
        if graph_impl(self.config) in ("local", "transformer_engine"):
            delete_graphs(graphable_layers(self._chunks), self._graphs)
            self._graphs = None

    def _capture(self) -> None:
        """As in Megatron-LM's train (training.py), between two steps."""
        if self._gathers_late:
            for chunk in self._chunks:
                chunk.disable_forward_pre_hook(param_sync=False)
        self._graphs = make_te_graphs(
            self._chunks,
            self.config,
            self._optimizer,
            seq_length=self._size.seq,
            micro_batch_size=self._micro_batch_size,
            num_microbatches=self._size.batch // self._micro_batch_size,
            data_parallel_size=self._replicas,
        )
        if self._gathers_late:
            for chunk in self._chunks:
                chunk.enable_forward_pre_hook()
            self._graphs.cuda_graph_set_manual_hooks()

    def _step(self) -> None:
        if self._capture_after == 0:
            self._capture()
        self._capture_after -= 1
        batch = [tensor.to(self._device, non_blocking=True) for tensor in next(self._batches)]
        size = self._micro_batch_size
        parts = zip(*(tensor.split(size) for tensor in batch), strict=True)
        microbatches = [{"tokens": tokens, "labels": labels} for tokens, labels in parts]
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        one = len(self._chunks) == 1
        records = self._schedule(
            forward_step_func=self._forward_step,
            data_iterator=(
                iter(microbatches) if one else [iter(microbatches) for _ in self._chunks]
            ),
            model=self._chunks[0] if one else self._chunks,
            num_microbatches=len(microbatches),
            seq_length=self._size.seq,
            micro_batch_size=size,
            forward_only=False,
        )
        self._optimizer.step()
        if self._gathers_late and self._is_first_step:
            for chunk in self._chunks:
                chunk.enable_forward_pre_hook()
        self._is_first_step = False
        if records:
            loss = torch.stack(records).mean()
            if self._replicas > 1:
                dist.all_reduce(loss, group=parallel_state.get_data_parallel_group())
                loss /= self._replicas
            if self.keep_losses:
                self.losses.append(loss)

    def _forward_step(self, iterator: Any, chunk: nn.Module) -> tuple[Tensor, Any]:
        return self._call(chunk, **next(iterator)), _mean


def graph_impl(config: Any) -> str:
    """How the engine captures CUDA graphs: ``none``, ``local``, ``transformer_engine``..."""
    return str(getattr(config, "cuda_graph_impl", "none"))


def _capture_stream(config: Any) -> AbstractContextManager[Any]:
    """Where DDP's hooks are to be made, so that a graph of the whole iteration holds them."""
    if graph_impl(config) == "none":
        return nullcontext()
    stream = torch.cuda.Stream()
    if graph_impl(config) == "full_iteration":
        from megatron.core.full_cuda_graph import get_shared_capture_stream

        stream = get_shared_capture_stream()
    stream.wait_stream(torch.cuda.current_stream())
    return torch.cuda.stream(stream)


def _mean(output: Tensor) -> tuple[Tensor, Tensor]:
    loss = output.mean()
    return loss, loss.detach().clone()


def check_same_settings(loop: DirectLoop, chunk: Any) -> None:
    """Compares the direct loop's DDP config with the strategy's, so that both do the same work."""
    mine, theirs = dataclasses.asdict(loop.ddp_config), dataclasses.asdict(chunk.ddp_config)
    different = {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]}
    assert not different, f"The loops differ in {different} (direct, strategy)."


def dist_size() -> int:
    """Ranks, before the process group exists."""
    import os

    return int(os.environ["WORLD_SIZE"])
