"""From what the user asked for to a model that runs: the order of decisions of a run's start.

Before process groups exist: sizes, layout, switches, the declared dimensions. After the user's
model is built: its kind and its optimizer complete the facts, and chunks are wrapped for the
engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from lightning_mcore._mcore import engine
from lightning_mcore.build import Factory, build_pipeline, find_model
from lightning_mcore.config import ModelDims, ParallelSizes, SwitchRequest
from lightning_mcore.engine_fields import (
    check_ddp_fields,
    check_optimizer_fields,
    ddp_fields,
    model_fields,
    optimizer_fields,
)
from lightning_mcore.errors import ConfigurationError, SequenceParallelRefused
from lightning_mcore.layout import Layout, check_model_dims, pick_vpp, resolve_layout
from lightning_mcore.nonfinite import NonFinite
from lightning_mcore.optimizer import build_training, optimizer_kind
from lightning_mcore.parallel_state import ParallelState
from lightning_mcore.plain import init_weights
from lightning_mcore.precision import MCorePrecision
from lightning_mcore.run import ModelRun, trainable_names, wrap_chunks
from lightning_mcore.stage import Pipeline
from lightning_mcore.switches import Facts, Switch, Switches, resolve_switches
from lightning_mcore.watch.progress import Progress

# WeightAveraging came with Lightning 2.6.
_AVERAGING_CALLBACKS = tuple(
    getattr(callbacks, name)
    for name in ("StochasticWeightAveraging", "WeightAveraging")
    if hasattr(callbacks, name)
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What the user asked of the strategy."""

    sizes: ParallelSizes
    switches: SwitchRequest
    ddp: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the engine's DDP config."""
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the engine's optimizer config."""
    init_from: str | Path | None = None
    """Checkpoint to load weights from."""
    seq_length: int | None = None
    """Tokens per sample, where the model call does not show them."""
    nonfinite: NonFinite = "error"
    """What to do about NaN or Inf in a gradient."""
    torch_norms_only: bool = False
    """Found while building: the model's norms refuse sequence parallelism."""

    def __post_init__(self) -> None:
        """Refuses fields that are set elsewhere."""
        if self.nonfinite not in get_args(NonFinite):
            raise ConfigurationError(
                f"`nonfinite` ({self.nonfinite!r}) must be one of {list(get_args(NonFinite))}; use"
                " nonfinite='error' to stop before a parameter changes."
            )
        check_ddp_fields(self.ddp)
        check_optimizer_fields(self.optimizer)
        engine.check_field_names(ddp=self.ddp, optimizer=self.optimizer)
        if self.optimizer_instances > 1 and find_spec("einops") is None:
            # megatron/core/parallel_state.py imports it for groups of several instances.
            raise ConfigurationError(
                f"`num_distributed_optimizer_instances` ({self.optimizer_instances}) needs the"
                " package einops, which the engine imports for it; pip install einops."
            )

    @property
    def optimizer_instances(self) -> int:
        """Copies of the distributed optimizer's shards."""
        return int(self.ddp.get("num_distributed_optimizer_instances", 1))

    def facts(
        self,
        precision: MCorePrecision,
        device: torch.device,
        *,
        native: bool | None = None,
        optimizer: str | None = None,
    ) -> Facts:
        """What is known about installation, hardware, model and optimizer; ``None`` if not yet."""
        return Facts(
            engine_version=engine.engine_version(),
            on_gpu=device.type != "cpu",
            precision=str(precision.precision),
            native_model=native,
            optimizer=optimizer,
            has_te_or_apex=engine.has_te_or_apex(),
            torch_norms_only=self.torch_norms_only,
            num_optimizer_instances=self.optimizer_instances,
        )


def check_trainer(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Refuses what Lightning can do but an engine-driven step cannot.

    Raises:
        ConfigurationError: On every rank alike, before process groups exist.
    """
    if not module.automatic_optimization:
        raise ConfigurationError(
            "`automatic_optimization` (False) cannot work here: the engine's schedule runs forward"
            " and backward of all microbatches as one, with one optimizer; use automatic"
            " optimization, or train modules with several optimizers under DDPStrategy."
        )
    if is_overridden("backward", module, pl.LightningModule):
        raise ConfigurationError(
            "`backward` is overridden, but the engine's schedule runs the backward pass of every"
            " microbatch itself; scale or combine losses in training_step instead."
        )
    if getattr(trainer.strategy, "_layer_sync", None) is not None:
        raise ConfigurationError(
            "`sync_batchnorm` (True) is not supported: with pipeline stages, ranks do not run the"
            " same norms at the same time; leave it out, or use norms without batch statistics."
        )
    _check_callbacks(trainer.callbacks)  # type: ignore[attr-defined]


def _check_callbacks(found: Sequence[object]) -> None:
    averaging = [type(c).__name__ for c in found if isinstance(c, _AVERAGING_CALLBACKS)]
    if averaging:
        raise ConfigurationError(
            f"Callbacks {averaging} copy and swap the parameters of a whole module, which is"
            " sharded and lives in the engine's buffers here; remove them, and average checkpoints"
            " afterwards."
        )
    unfreezing = [type(c).__name__ for c in found if isinstance(c, callbacks.BaseFinetuning)]
    if unfreezing:
        raise ConfigurationError(
            f"Callbacks {unfreezing} make parameters trainable during fit, but the engine's"
            " gradient buffers and optimizer are built at its start; train them from the start with"
            " a learning rate of 0, or run a second fit with them unfrozen."
        )


def resolve_before_groups(
    request: Request, dims: ModelDims, facts: Facts, *, world_size: int, rank: int
) -> tuple[Layout, Switches]:
    """Validates everything that is known before process groups exist.

    Raises:
        ConfigurationError: On every rank alike.
    """
    sizes = request.sizes
    if request.switches.overlap_p2p is True and sizes.vpp is None and sizes.pp > 1:
        sizes = dataclasses.replace(sizes, vpp=pick_vpp(dims, sizes.pp))
    layout = resolve_layout(sizes, world_size, rank)
    switches = resolve_switches(request.switches, layout, facts)
    check_model_dims(dims, layout, sequence_parallel=switches.sequence_parallel.effective)
    return layout, switches


def fields_for_model(
    request: Request,
    layout: Layout,
    precision: MCorePrecision,
    device: torch.device,
    *,
    native: bool,
) -> dict[str, Any]:
    """Fields of the engine's model config for plain torch modules (``native``) or Megatron ones."""
    facts = request.facts(precision, device, native=native)
    switches = resolve_switches(request.switches, layout, facts)
    return model_fields(layout, switches, precision.engine_fields(native=native), device)


def build_model(
    model: Factory | nn.Sequential | Sequence[nn.Module],
    request: Request,
    state: ParallelState,
    precision: MCorePrecision,
    device: torch.device,
) -> tuple[Pipeline, Request]:
    """Builds this rank's chunks, without sequence parallelism if ``"auto"`` meets a refusal.

    Returns:
        The model, and the request with what was learnt about it.
    """
    native = not callable(model) or isinstance(model, nn.Module)
    fields = fields_for_model(request, state.layout, precision, device, native=native)
    try:
        return build_pipeline(model, state, fields), request
    except SequenceParallelRefused:
        if request.switches.sequence_parallel != "auto":
            raise
    request = dataclasses.replace(request, torch_norms_only=True)
    fields = fields_for_model(request, state.layout, precision, device, native=native)
    return build_pipeline(model, state, fields), request


def prepare_run(
    request: Request,
    module: pl.LightningModule,
    state: ParallelState,
    precision: MCorePrecision,
    device: torch.device,
    progress: Progress,
    *,
    make_optimizer: Callable[[], torch.optim.Optimizer] | None,
) -> tuple[ModelRun, Facts]:
    """Wraps the built model for the engine. Collective over the world.

    Args:
        request: What the user asked for.
        module: The LightningModule after ``configure_model``.
        state: Layout and groups.
        precision: Dtypes.
        device: Of this rank.
        progress: Where this rank notes how far it is.
        make_optimizer: Runs the user's ``configure_optimizers``; ``None`` when not fitting.

    Returns:
        The run, and the facts that its switches were decided on.
    """
    layout = state.layout
    pipeline, inner = find_model(
        module,
        state,
        lambda native: fields_for_model(request, layout, precision, device, native=native),
    )
    native = pipeline is None or pipeline.native
    module.to(device)
    chunks, config = wrap_chunks(inner, pipeline, precision)
    if request.init_from is not None:
        init_weights(
            request.init_from,
            inner,
            strict=module.strict_loading,
            layout=layout,
            groups=state.groups,
        )
    torch_optimizer = make_optimizer() if make_optimizer is not None else None
    kind = optimizer_kind(torch_optimizer) if torch_optimizer is not None else None
    facts = request.facts(precision, device, native=native, optimizer=kind)
    switches = resolve_switches(request.switches, layout, facts)
    if "grad_reduce_in_fp32" in request.ddp:
        asked = bool(request.ddp["grad_reduce_in_fp32"])
        switch = Switch("grad_reduce_in_fp32", asked, asked, "requested in `ddp`")
        switches = dataclasses.replace(switches, grad_reduce_in_fp32=switch)
    optimizer = None
    if torch_optimizer is not None:
        chunks, optimizer = build_training(
            chunks,
            config,
            torch_optimizer,
            trainable_names(inner),
            switches,
            ddp_fields(switches, request.ddp),
            optimizer_fields(
                switches, precision.optimizer_fields(native=native), request.optimizer
            ),
        )
    run = ModelRun(
        module=module,
        pipeline=pipeline,
        inner=inner,
        chunks=chunks,
        state=state,
        switches=switches,
        precision=precision,
        device=device,
        micro_batch_size=request.switches.micro_batch_size,
        seq_length=request.seq_length,
        optimizer=optimizer,
        progress=progress,
        nonfinite=request.nonfinite,
    )
    return run, facts
