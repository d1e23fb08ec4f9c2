"""The Lightning strategy: maps each hook to one call into the rest of the package."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only
from torch import Tensor, nn
from typing_extensions import override

from lightning_mcore import _lightning
from lightning_mcore._mcore import engine
from lightning_mcore._mcore.cpu import CpuAdapter
from lightning_mcore.build import Factory, build_pipeline, find_model, model_fields
from lightning_mcore.checkpoint import TrainState, load_checkpoint, load_weights, save_checkpoint
from lightning_mcore.config import ModelDims, ParallelSizes, SwitchRequest
from lightning_mcore.data_check import check_same_batch
from lightning_mcore.errors import ConfigurationError, NotInitializedError
from lightning_mcore.layout import Layout, check_model_dims, pick_vpp, resolve_layout
from lightning_mcore.header import Batch, format_header
from lightning_mcore.optimizer import StepStats, build_training, optimizer_kind
from lightning_mcore.parallel_state import (
    Groups,
    ParallelState,
    destroy_parallel_state,
    init_parallel_state,
)
from lightning_mcore.precision import MCorePrecision
from lightning_mcore.run import (
    ModelRun,
    check_ddp_fields,
    check_optimizer_fields,
    count_parameters,
    ddp_fields,
    optimizer_fields,
    trainable_names,
    wrap_chunks,
)
from lightning_mcore.stage import Pipeline
from lightning_mcore.switches import Facts, Switches, resolve_switches
from lightning_mcore.version import package_versions

Auto = bool | Literal["auto"]


class MCoreStrategy(ParallelStrategy):
    """Trains a LightningModule on Megatron-Core with tensor, pipeline and data parallelism.

    Args:
        tp: Tensor-parallel size: ranks that share each layer.
        pp: Pipeline size: ranks that hold consecutive stages of layers.
        vpp: Chunks per pipeline rank. ``None``: one chunk, 1F1B. 2 or more: interleaved 1F1B.
        cp: Context-parallel size: ranks that share each sequence.
        ep: Expert-parallel size: ranks that hold different experts.
        etp: Tensor-parallel size of experts. ``None``: like ``tp``.
        micro_batch_size: Samples in a microbatch. ``None``: the whole batch without pipelining,
            1 with it.
        sequence_parallel: Splits activations between tensor-parallel regions along the sequence.
        overlap_grad_reduce: Reduces gradients bucket by bucket during the backward pass.
        overlap_param_gather: Gathers updated parameters during the next forward pass.
        use_distributed_optimizer: Shards optimizer state over data parallel (ZeRO-1).
        overlap_p2p: Overlaps pipeline sends and receives with compute; needs ``vpp >= 2``. ``True``
            with ``vpp=None`` picks the smallest ``vpp`` that divides ``model_dims['num_layers']``.
        bucket_size: Elements per gradient bucket. ``None``: the engine's ``max(40M, 1M x dp)``.
        seq_length: Tokens per sample, only where the model call has no token ids of shape
            ``[b, s]`` to read it from.
        ddp: Further fields of the engine's DistributedDataParallelConfig.
        optimizer: Further fields of the engine's OptimizerConfig.
        init_from: Checkpoint directory to load weights (only) from, in any layout.
        timeout_s: Seconds after which a collective that some rank has not joined fails.
        process_group_backend: Backend of the world group; by default nccl on GPUs, gloo on CPU.

    Every switch takes ``True``, ``False`` or ``"auto"``; the run header prints its effective value
    and the reason.

    Raises:
        ConfigurationError: For sizes and switches that cannot work, as soon as it can be known: for
            the sizes alone here, with the world size, the hardware and the LightningModule's
            optional ``model_dims`` before any process group exists.
    """

    strategy_name = "mcore"

    def __init__(
        self,
        tp: int = 1,
        pp: int = 1,
        vpp: int | None = None,
        cp: int = 1,
        ep: int = 1,
        etp: int | None = None,
        *,
        micro_batch_size: int | None = None,
        sequence_parallel: Auto = "auto",
        overlap_grad_reduce: Auto = "auto",
        overlap_param_gather: Auto = "auto",
        use_distributed_optimizer: Auto = "auto",
        overlap_p2p: Auto = "auto",
        bucket_size: int | None = None,
        seq_length: int | None = None,
        ddp: dict[str, Any] | None = None,
        optimizer: dict[str, Any] | None = None,
        init_from: str | Path | None = None,
        timeout_s: float = 1800.0,
        process_group_backend: str | None = None,
    ) -> None:
        super().__init__()
        self._sizes = ParallelSizes(tp=tp, pp=pp, vpp=vpp, cp=cp, ep=ep, etp=etp)
        self._request = SwitchRequest(
            sequence_parallel=sequence_parallel,
            overlap_grad_reduce=overlap_grad_reduce,
            overlap_param_gather=overlap_param_gather,
            use_distributed_optimizer=use_distributed_optimizer,
            overlap_p2p=overlap_p2p,
            bucket_size=bucket_size,
            micro_batch_size=micro_batch_size,
        )
        self._seq_length = seq_length
        self._ddp_fields = dict(ddp or {})
        self._optimizer_fields = dict(optimizer or {})
        self._init_from = init_from
        self._timeout_s = timeout_s
        self._backend = process_group_backend
        self.num_nodes = 1
        self._layout: Layout | None = None
        self._switches: Switches | None = None
        self._state: ParallelState | None = None
        self._run: ModelRun | None = None
        self._adapter: CpuAdapter | None = None
        self._sync_gradients = True
        self._checked_batch = False
        self._failed = False
        check_ddp_fields(self._ddp_fields)
        check_optimizer_fields(self._optimizer_fields)

    # ------------------------------------------------------------------ what users read

    @property
    def layout(self) -> Layout:
        """Sizes and this rank's coordinates."""
        if self._layout is None:
            raise NotInitializedError("The layout exists once the Trainer has started processes.")
        return self._layout

    @property
    def groups(self) -> Groups:
        """Process groups of this rank, for collectives of your own."""
        return self._parallel_state.groups

    @property
    def switches(self) -> Switches:
        """Effective value and reason of every communication switch."""
        if self._switches is None:
            raise NotInitializedError("Switches are resolved once the Trainer has started processes.")
        return self._switches

    @property
    def step_stats(self) -> StepStats | None:
        """Gradient norm and outcome of the latest optimizer step; ``None`` before the first."""
        return self._run.stats if self._run is not None else None

    def build(self, model: Factory | nn.Sequential | Sequence[nn.Module]) -> Pipeline:
        """Builds this rank's part of a model; to be called in ``configure_model`` on every rank.

        Args:
            model: ``factory(stage, **fields)``, which passes ``fields`` on to
                ``TransformerConfig(..., **fields)`` and returns the chunk that ``stage`` names; or an
                ``nn.Sequential`` (or list of blocks), which is cut into balanced stages.

        Returns:
            A module to be called like the whole model. In a step, the call ends the step on every
            stage but the last, whose remaining code computes the loss.
        """
        native = not callable(model) or isinstance(model, nn.Module)
        return build_pipeline(model, self._parallel_state, self._model_fields(native=native))

    def sync_parameters(self) -> None:
        """Makes parameters whole on this rank, for code that reads weights between steps.

        With ``overlap_param_gather`` they are stale from the optimizer step until the next forward
        pass. Collective over the data-parallel groups.
        """
        if self._run is not None:
            self._run.gather_parameters()

    # ------------------------------------------------------------------ processes and groups

    @property
    def is_distributed(self) -> bool:
        """Tells Lightning to inject samplers and to honour ``sync_dist``."""
        return True

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Ranks on this node."""
        return len(self.parallel_devices or ())

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.layout.dp, "rank": self.layout.dp_rank}

    @property
    def process_group_backend(self) -> str | None:
        """Backend of the world group."""
        return self._backend

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = _lightning.subprocess_launcher(
                self.cluster_environment, self.num_processes, self.num_nodes
            )

    def set_world_ranks(self) -> None:
        """Tells the cluster environment this process's place (called by Lightning)."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(
                self.node_rank * self.num_processes + self.local_rank
            )
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = fabric_rank_zero_only.rank = self.global_rank

    @override
    def connect(self, model: pl.LightningModule) -> None:
        if not model.automatic_optimization:
            raise ConfigurationError(
                "`automatic_optimization` (False) cannot work here: the engine's schedule runs"
                " forward and backward of all microbatches as one; use automatic optimization with"
                " one optimizer."
            )
        super().connect(model)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        reset_seed()
        self.set_world_ranks()
        self._resolve()
        if self.root_device.type == "cpu":
            self._adapter = CpuAdapter()
            self._adapter.__enter__()
        assert self.cluster_environment is not None
        self._backend = _lightning.init_world(
            self.cluster_environment, self.root_device, self._backend, self._timeout_s
        )
        self._state = init_parallel_state(
            self.layout,
            device=self.root_device,
            timeout_s=self._timeout_s,
            instances=self._facts().num_optimizer_instances,
        )

    def _resolve(self) -> None:
        """Validates everything that is known before process groups exist."""
        dims = ModelDims.from_object(getattr(self.lightning_module, "model_dims", None))
        sizes = self._sizes
        if self._request.overlap_p2p is True and sizes.vpp is None and sizes.pp > 1:
            sizes = ParallelSizes(
                tp=sizes.tp, pp=sizes.pp, vpp=pick_vpp(dims, sizes.pp), cp=sizes.cp,
                ep=sizes.ep, etp=sizes.etp,
            )
        self._layout = resolve_layout(sizes, self.world_size, self.global_rank)
        self._switches = resolve_switches(self._request, self._layout, self._facts())
        check_model_dims(
            dims, self._layout, sequence_parallel=self._switches.sequence_parallel.effective
        )

    def _facts(self, native: bool | None = None, optimizer: str | None = None) -> Facts:
        return Facts(
            engine_version=engine.engine_version(),
            on_gpu=self.root_device.type != "cpu",
            precision=self.precision_plugin.precision,
            native_model=native,
            optimizer=optimizer,
            has_te_or_apex=engine.has_te_or_apex(),
            num_optimizer_instances=self._ddp_fields.get("num_distributed_optimizer_instances", 1),
        )

    def _model_fields(self, *, native: bool) -> dict[str, Any]:
        switches = resolve_switches(self._request, self.layout, self._facts(native=native))
        dtypes = self.precision_plugin.engine_fields(native=native)
        return model_fields(self.layout, switches, dtypes, self.root_device)

    @property
    def _parallel_state(self) -> ParallelState:
        if self._state is None:
            raise NotInitializedError(
                "Process groups exist from the Trainer's start until its teardown; use them in"
                " configure_model, setup, or later hooks."
            )
        return self._state

    # ------------------------------------------------------------------ model and optimizer

    @property
    @override
    def precision_plugin(self) -> MCorePrecision:
        plugin = self._precision_plugin
        return plugin if isinstance(plugin, MCorePrecision) else MCorePrecision()

    @precision_plugin.setter
    @override
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = MCorePrecision.from_plugin(precision_plugin)

    @override
    def model_to_device(self) -> None:
        assert self.lightning_module is not None
        self.lightning_module.to(self.root_device)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        pipeline, inner = find_model(
            self.lightning_module, self._parallel_state, lambda native: self._model_fields(native=native)
        )
        native = pipeline is None or pipeline.native
        self.model_to_device()
        chunks, config = wrap_chunks(inner, pipeline, self.precision_plugin)
        if self._init_from is not None:
            load_weights(self._init_from, inner, layout=self.layout, groups=self.groups)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            self._reset_optimizers_and_schedulers()
            self.setup_optimizers(trainer)
        facts = self._facts(native, optimizer_kind(self.optimizers[0]) if fitting else None)
        self._switches = resolve_switches(self._request, self.layout, facts)
        optimizer = None
        if fitting:
            chunks, optimizer = build_training(
                chunks, config, self.optimizers[0], trainable_names(inner), self._switches,
                ddp_fields(self._switches, self._ddp_fields),
                optimizer_fields(
                    self._switches, self.precision_plugin, self._optimizer_fields, native=native
                ),
            )
        self._run = ModelRun(
            module=self.lightning_module, pipeline=pipeline, inner=inner, chunks=chunks,
            state=self._parallel_state, switches=self._switches, precision=self.precision_plugin,
            device=self.root_device, micro_batch_size=self._request.micro_batch_size,
            seq_length=self._seq_length, optimizer=optimizer,
        )
        self._print_header(trainer, facts, inner)

    def _print_header(
        self, trainer: pl.Trainer, facts: Facts, inner: Sequence[nn.Module]
    ) -> None:
        total, per_rank = count_parameters(inner, self._parallel_state)
        rank_zero_info(
            format_header(
                versions=package_versions(),
                layout=self.layout,
                facts=facts,
                switches=self.switches,
                batch=Batch(
                    micro_batch_size=self._request.micro_batch_size,
                    accumulate_grad_batches=trainer.accumulate_grad_batches,
                ),
                num_parameters=total,
                num_parameters_per_rank=per_rank,
                max_connections=os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"),
            )
        )

    # ------------------------------------------------------------------ steps

    @property
    def _model_run(self) -> ModelRun:
        if self._run is None:
            raise NotInitializedError("The model is wrapped in the Trainer's setup; run a Trainer.")
        return self._run

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        batch, *rest = args
        if not self._checked_batch:
            check_same_batch(batch, self._parallel_state)
            self._checked_batch = True
        step = self.lightning_module.training_step
        return self._model_run.train_step(
            lambda microbatch: step(microbatch, *rest, **kwargs),
            batch,
            accumulate=self.lightning_module.trainer.accumulate_grad_batches,
            sync=self._sync_gradients,
        )

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("validation_step", *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test_step", *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        predictions = self._evaluate("predict_step", *args, **kwargs)
        if self.layout.pp == 1:
            return predictions
        # Users collect predictions on the main process, which is a first stage.
        box = [predictions if self.layout.is_last_stage else None]
        source = dist.get_process_group_ranks(self.groups.pp)[-1]
        dist.broadcast_object_list(box, source, group=self.groups.pp, device=self.root_device)
        return box[0]

    def _evaluate(self, name: str, batch: Any, *args: Any, **kwargs: Any) -> Any:
        step = getattr(self.lightning_module, name)
        return self._model_run.evaluation_step(
            lambda microbatch: step(microbatch, *args, **kwargs), batch
        )

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Lightning enters this around batches that only accumulate gradients."""
        self._sync_gradients = False
        try:
            yield
        finally:
            self._sync_gradients = True

    @override
    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Runs the hooks around the backward pass; the schedule has run the pass itself."""
        assert self.lightning_module is not None
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        return self.precision_plugin.post_backward(closure_loss, self.lightning_module)

    @override
    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        run = self._model_run
        assert run.optimizer is not None
        model = model or self.lightning_module
        if run.optimizer.runs_torch_optimizer:
            # The engine steps this very optimizer; stepping it here too would do it twice.
            result = _lightning.run_closure(self.precision_plugin, model, optimizer, closure)
        else:
            # The user's optimizer runs the closure and, finding no gradients on the parameters (the
            # engine keeps them in its buffers), changes nothing.
            result = super().optimizer_step(optimizer, closure, model, **kwargs)
        run.optimizer_step()
        return result

    @override
    def on_validation_start(self) -> None:
        self._model_run.set_hooks(False)

    @override
    def on_validation_end(self) -> None:
        self._model_run.set_hooks(True)

    @override
    def on_train_end(self) -> None:
        self._model_run.set_hooks(False)

    # ------------------------------------------------------------------ collectives of Lightning

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces over data parallel unless told otherwise: model-parallel peers hold copies."""
        if not isinstance(tensor, Tensor):
            return tensor
        return _lightning.reduce_tensor(tensor, group or self.groups.dp_cp, reduce_op)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks (or any) decided so; over the world, on the host."""
        votes = torch.tensor(int(decision))
        dist.all_reduce(votes, group=self.groups.world_cpu)
        return bool(votes == self.world_size) if all else bool(votes)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gathers over data parallel unless told otherwise."""
        return super().all_gather(tensor, group or self.groups.dp, sync_grads)

    @override
    def barrier(self, name: str | None = None) -> None:
        if _lightning.world_is_initialized():
            on_gpu = self.root_device.type == "cuda"
            dist.barrier(device_ids=[self.root_device.index] if on_gpu else None)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not _lightning.world_is_initialized():
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]

    # ------------------------------------------------------------------ checkpoints

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        """Sharded state is loaded into the wrapped model and the engine's optimizer."""
        return True

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return False

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Empty: ``save_checkpoint`` writes each rank's shards itself."""
        return {}

    @override
    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Empty, for the same reason."""
        return {}

    @override
    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        """Nothing to do: ``load_checkpoint`` has loaded the shards in place."""

    @override
    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Nothing to do, for the same reason."""

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        if storage_options is not None:
            raise ConfigurationError(
                "`storage_options` is for CheckpointIO plugins, which sharded checkpoints do not"
                " use; leave it out."
            )
        run = self._model_run
        run.gather_parameters()
        with_optimizer = bool(checkpoint.pop("optimizer_states", None))
        checkpoint.pop("state_dict", None)
        save_checkpoint(
            Path(self.broadcast(str(filepath))),
            self._train_state(with_optimizer),
            checkpoint,
            layout=self.layout,
            groups=self.groups,
            info={
                "precision": str(self.precision_plugin.precision),
                "global_step": checkpoint.get("global_step"),
                "epoch": checkpoint.get("epoch"),
            },
        )

    @override
    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        assert self.lightning_module is not None
        fitting = self._model_run.optimizer is not None
        loaded = load_checkpoint(
            Path(self.broadcast(str(checkpoint_path))),
            self._train_state(fitting),
            load_optimizer=fitting,
            strict=self.lightning_module.strict_loading,
            layout=self.layout,
            groups=self.groups,
        )
        return {"state_dict": {}, **loaded}

    def _train_state(self, with_optimizer: bool) -> TrainState:
        run = self._model_run
        optimizer = run.optimizer.engine if with_optimizer and run.optimizer else None
        return TrainState(chunks=run.inner, optimizer=optimizer)

    # ------------------------------------------------------------------ the end

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._failed = True

    @override
    def teardown(self) -> None:
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self._run = None
        self._checked_batch = False
        try:
            if self._state is not None:
                destroy_parallel_state(self._state, graceful=not self._failed)
        finally:
            self._state = None
            self._failed = False
            if self._adapter is not None:
                self._adapter.__exit__(None, None, None)
                self._adapter = None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        strategy_registry.register(
            cls.strategy_name, cls, description="Megatron-Core with data parallelism"
        )
