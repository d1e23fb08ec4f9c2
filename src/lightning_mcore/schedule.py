"""Runs the user's step under the engine's schedules.

Enters: a step function, a plan of microbatches and the wrapped chunks. Leaves: what the step
returned per microbatch on the last stage, with its log. All ranks of a model-parallel group call
``StepRunner`` together, in training all ranks of the world.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightning_mcore._mcore import engine
from lightning_mcore.activation_shape import ActivationShapes, model_call_of
from lightning_mcore.batch import Microbatch, Run
from lightning_mcore.context import SequenceShard
from lightning_mcore.errors import ConfigurationError
from lightning_mcore.frames import with_room_for_frames
from lightning_mcore.graphs import LayerGraphs
from lightning_mcore.randomness import StepRandomness
from lightning_mcore.ranges import ScheduleRanges, profiling
from lightning_mcore.stage import Pipeline, StageEnd, run_chunk
from lightning_mcore.step_log import StepLog
from lightning_mcore.step_output import NUM_TOKENS, check_tokens_wanted, loss_of, tokens_of
from lightning_mcore.watch.progress import Progress

StepFunction = Callable[[Any], Any]
"""Runs the user's step on one microbatch."""


@dataclass(frozen=True, slots=True)
class MicrobatchOutput:
    """What the user's step returned for one microbatch, on the last stage."""

    value: Any
    samples: int


class StepRunner:
    """Runs steps under the schedule that fits the layout.

    Args:
        pipeline: The model that the user's step calls, or ``None`` for a plain LightningModule,
            which is its own single chunk and need not call anything.
        chunks: Wrapped chunks of this rank, in pipeline order.
        device: Of this rank.
        step_context: Opens the context in which a step runs (autocast).
        seq_length: Tokens, where the model call does not show them.
        randomness: Random streams, where the model has several stages or ``plans_layers``.
        plans_layers: Whether training runs under the combined 1F1B schedule of expert layers.
        shard: Cuts each microbatch along the sequence, under context parallelism.
        per_token_loss: Whether the step returns a mean loss with its number of tokens, by which
            microbatches, shards and ranks are weighted.
        check_shape: Called with the sequence length and size of each new shape of microbatch.
        progress: Where each microbatch is noted.
        graphs: CUDA graphs of layers, which every step of training must fit.
    """

    def __init__(
        self,
        pipeline: Pipeline | None,
        chunks: Sequence[nn.Module],
        *,
        device: torch.device,
        step_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        seq_length: int | None = None,
        randomness: StepRandomness | None = None,
        plans_layers: bool = False,
        shard: SequenceShard | None = None,
        per_token_loss: bool = False,
        check_shape: Callable[[int, int], None] | None = None,
        progress: Progress | None = None,
        graphs: LayerGraphs | None = None,
    ) -> None:
        self._graphs = graphs
        if graphs is not None:
            # So that shapes are looked at, though the engine may not need them.
            check_shape = check_shape or (lambda seq_length, micro_batch_size: None)
        self._progress = progress or Progress()
        self._randomness = randomness
        self._plans_layers = plans_layers
        self._shard = shard or SequenceShard(cp=1, cp_rank=0)
        self._per_token_loss = per_token_loss
        self._earlier_tokens: Tensor | None = None
        """Tokens of the earlier batches of an accumulation; ``None`` before the first."""
        self._pipeline = pipeline
        self._chunks = list(chunks)
        self._device = device
        self._step_context = step_context
        self._shape_of = ActivationShapes(
            pipeline,
            self._shard,
            device=device,
            step_context=step_context,
            seq_length=seq_length,
            check=check_shape,
        )
        config: Any = self._chunks[0].config
        self._pp = int(config.pipeline_model_parallel_size)

    def train(
        self,
        step: StepFunction,
        run: Run,
        log: StepLog,
        *,
        loss_scale: float,
        first: bool = True,
        sync: bool,
        may_skip: bool = False,
    ) -> list[MicrobatchOutput]:
        """Forward and backward of one batch; gradients end up in the engine's buffers.

        Args:
            step: The user's training step.
            run: Microbatches of the batch.
            log: Where its log calls go.
            loss_scale: Factor on the loss before the backward pass (1 / accumulated batches).
            first: Whether parameters may have changed since the last batch: not in the later
                batches of an accumulation, which need not gather them again.
            sync: Whether to reduce gradients over data parallel at the end; not in the earlier
                batches of an accumulation.
            may_skip: Whether the step may return ``None`` for no loss: in one process only.
        """
        cp = self._shard.cp
        tokens_here = torch.zeros((), dtype=torch.int, device=self._device)

        def on_last(output: Any, microbatch: Microbatch) -> tuple[Tensor, Callable[..., Any]]:
            if output is None and may_skip:
                nothing = torch.zeros((), device=self._device, requires_grad=True)
                return nothing * 1.0, lambda scaled: (scaled, None)
            loss = loss_of(output)
            tokens = tokens_of(output) if self._per_token_loss else None
            check_tokens_wanted(output, self._per_token_loss)
            log.add_loss(loss, microbatch.size if tokens is None else tokens)
            # Without its graph, which would otherwise live until the last microbatch is done.
            kept = apply_to_collection(output, Tensor, Tensor.detach)
            record = MicrobatchOutput(kept, microbatch.size)
            if tokens is None:
                # The schedule multiplies by the context-parallel size (schedules.py,
                # forward_step_calc_loss), as if the loss were this shard's part of a sum over the
                # sequence; it is a mean, of which the shard's part is 1 / cp. And a new tensor,
                # because the schedule scales it in place.
                return loss * (1.0 / cp), lambda scaled: (scaled, record)
            tokens_here.add_(tokens)
            return loss * tokens, lambda scaled: (scaled, tokens, record)

        changes: dict[str, Any] = {}
        config: Any = self._chunks[0].config
        if loss_scale != 1.0 and not self._per_token_loss:
            # Through the engine's hook rather than on the loss, so that it reaches the auxiliary
            # losses of expert layers as well.
            engine_scale = config.grad_scale_func
            changes["grad_scale_func"] = lambda value: engine_scale(value) * loss_scale
        if not first:
            changes["param_sync_func"] = None
        earlier = self._earlier_tokens
        if not sync:
            changes |= dict.fromkeys(
                ("finalize_model_grads_func", "grad_sync_func", "no_sync_func")
            )
        elif earlier is not None:
            # The engine divides by the tokens of the schedule that it finalizes, which is only the
            # last one of an accumulation.
            finalize = config.finalize_model_grads_func
            changes["finalize_model_grads_func"] = lambda model, num_tokens=None, **kw: finalize(
                model, None if num_tokens is None else num_tokens + earlier, **kw
            )
        with ExitStack() as stack:
            if not sync:
                for context in engine.without_sync(self._chunks):
                    stack.enter_context(context)
            stack.enter_context(self._config_changed(changes))
            outputs = self._run(step, run, log, on_last, forward_only=False)
        if self._per_token_loss:
            before = 0 if earlier is None else earlier
            self._earlier_tokens = None if sync else tokens_here + before
        return outputs

    def evaluate(
        self, step: StepFunction, runs: Sequence[Run], log: StepLog
    ) -> list[MicrobatchOutput]:
        """Forward of one batch, without gradients."""

        def on_last(output: Any, microbatch: Microbatch) -> tuple[Tensor, Callable[..., Any]]:
            record = MicrobatchOutput(output, microbatch.size)
            # The engine wants a tensor here; the step's own output can be anything.
            return torch.zeros((), device=self._device), lambda _, non_loss_data: record

        outputs: list[MicrobatchOutput] = []
        # Lightning evaluates in inference mode, whose tensors may be cached inside the model
        # (rotary embeddings, masks) and then fail in the next backward pass.
        # Batches of any size: groups of the smallest size, as fillers complete (``batch``).
        smallest = {"microbatch_group_size_per_vp_stage": self._pp}
        layers = self._graphs.evaluating() if self._graphs is not None else nullcontext()
        with torch.inference_mode(False), torch.no_grad(), self._config_changed(smallest), layers:
            for run in runs:
                outputs += self._run(step, run, log, on_last, forward_only=True)
        return outputs

    @with_room_for_frames
    def _run(
        self,
        step: StepFunction,
        run: Run,
        log: StepLog,
        on_last: Callable[[Any, Microbatch], tuple[Tensor, Callable[..., Any]]],
        *,
        forward_only: bool,
    ) -> list[MicrobatchOutput]:
        if self._shard.cp > 1:
            cut = [replace(part, data=self._shard(part.data)) for part in run.microbatches]
            run = Run(tuple(cut))
        ranges = self._ranges(len(run.microbatches)) if profiling() else None

        def forward_step(
            iterator: Any, chunk: nn.Module, return_schedule_plan: bool = False
        ) -> tuple[Any, Any]:
            index, microbatch = next(iterator)
            self._progress.enter(self._progress.phase, index)
            if return_schedule_plan:
                return self._plan(step, chunk, index, microbatch, log, on_last)
            if self._randomness is not None:
                self._randomness.begin_step(index)
            stage = self._stage_index(chunk)
            with ranges.forward(stage, index) if ranges is not None else nullcontext():
                output, ended = self._call(step, chunk, microbatch, log)
            if not ended:
                return on_last(output, microbatch)
            if microbatch.is_filler and output is not None and self._is_last(chunk):
                return torch.zeros((), device=self._device), lambda *_, **__: None
            return output, None

        randomness = self._randomness
        combined = not forward_only and self._plans_layers
        with (
            randomness.schedule(combined) if randomness is not None else nullcontext(),
            self._config_changed({"timers": ranges} if ranges is not None else {}),
        ):
            seq_length, micro_batch_size = self._shape_of(step, run, forward_only=forward_only)
            if self._graphs is not None and not forward_only:
                self._graphs.check_step(seq_length, micro_batch_size, len(run.microbatches))
            records = engine.run_schedule(
                forward_step,
                self._chunks,
                [iter(enumerate(run.microbatches)) for _ in self._chunks],
                num_microbatches=len(run.microbatches),
                seq_length=seq_length,
                micro_batch_size=micro_batch_size,
                forward_only=forward_only,
            )
        return [record for record in records if record is not None]

    def _plan(
        self,
        step: StepFunction,
        chunk: Any,
        index: int,
        microbatch: Microbatch,
        log: StepLog,
        on_last: Callable[[Any, Microbatch], tuple[Tensor, Callable[..., Any]]],
    ) -> tuple[Any, Callable[[Tensor], Any]]:
        """The chunk's plan of layers for the combined 1F1B schedule, and what makes a loss of it.

        That schedule runs the layers of one microbatch between those of another, so the model call
        cannot run them. The step is run up to the call, whose arguments give the plan; once the
        output is there, the step is run again with it, from the same random state. What comes
        before the call runs twice on the last stage, and only the second run logs.
        """
        assert self._pipeline is not None
        assert self._randomness is not None
        with self._randomness.step_between_layers(index):
            call = model_call_of(self._pipeline, step, microbatch.data, self._step_context)
        plan = chunk.build_schedule_plan(*call.args_of_call, **call.kwargs_of_call)

        def finish(model_output: Tensor) -> Any:
            assert self._pipeline is not None
            assert self._randomness is not None
            with (
                self._randomness.step_between_layers(index),
                self._pipeline.handling(lambda args, kwargs: model_output),
                self._step_context(),
                log.microbatch(microbatch.size),
            ):
                output = step(microbatch.data)
                self._weigh(log, output)
                loss, record = on_last(output, microbatch)
            return record(loss)

        return plan, finish

    def _call(
        self, step: StepFunction, chunk: nn.Module, microbatch: Microbatch, log: StepLog
    ) -> tuple[Any, bool]:
        """Runs the step on one chunk; tells whether it ended at the model call."""
        if self._pipeline is None:
            with self._step_context(), log.microbatch(microbatch.size):
                output = step(microbatch.data)
                self._weigh(log, output)
                return output, False
        is_last = self._is_last(chunk)
        counts = is_last and not microbatch.is_filler
        handler, was_called = run_chunk(
            chunk,
            is_last=is_last,
            is_whole=self._pipeline.stages[0].count == 1,
            drop_output=microbatch.is_filler,
            around=self._randomness.chunk if self._randomness is not None else nullcontext,
        )
        with (
            self._pipeline.handling(handler),
            self._step_context(),
            log.microbatch(microbatch.size if counts else None),
        ):
            try:
                output = step(microbatch.data)
                self._weigh(log, output)
            except StageEnd as end:
                return end.output, True
        if not was_called():
            raise ConfigurationError(
                "The step returned without calling the model that strategy.build gave; call it once"
                " on every rank, before any code that is to run on the last stage only."
            )
        return output, False

    def _ranges(self, num_microbatches: int) -> ScheduleRanges:
        stages = [self._stage_index(chunk) for chunk in self._chunks]
        order = engine.backward_order(
            self._chunks[0].config, chunks=len(stages), num_microbatches=num_microbatches
        )
        return ScheduleRanges([(stages[chunk], microbatch) for chunk, microbatch in order])

    def _stage_index(self, chunk: nn.Module) -> int:
        if self._pipeline is None:
            return 0
        return self._pipeline.stages[self._chunks.index(chunk)].index

    def _is_last(self, chunk: nn.Module) -> bool:
        assert self._pipeline is not None
        return self._pipeline.stages[self._chunks.index(chunk)].is_last

    def _weigh(self, log: StepLog, output: Any) -> None:
        """Weights what the step logged by its tokens, if it tells them."""
        if self._per_token_loss and isinstance(output, Mapping) and NUM_TOKENS in output:
            log.weigh(tokens_of(output))

    @contextmanager
    def _config_changed(self, changes: Mapping[str, Any]) -> Iterator[None]:
        """Changes the schedule's own config (a copy of the chunks') for one call."""
        configs = list({id(chunk.config): chunk.config for chunk in self._chunks}.values())
        saved = [{name: getattr(config, name) for name in changes} for config in configs]
        for config in configs:
            for name, value in changes.items():
                setattr(config, name, value)
        try:
            yield
        finally:
            for config, values in zip(configs, saved, strict=True):
                for name, value in values.items():
                    setattr(config, name, value)
