"""From what the user asked for to a model that runs: the order of decisions of a run's start.

Before process groups exist: sizes, layout, switches, the declared dimensions. After the user's
model is built: its kind and its optimizer complete the facts, and chunks are wrapped for the
engine.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_mcore._mcore import engine, moe
from lightning_mcore._mcore.cuda_graphs import check_graphed_model
from lightning_mcore._mcore.userbuffers import check_model
from lightning_mcore.build import Factory, build_pipeline, find_model
from lightning_mcore.config import ModelDims, ParallelSizes, SwitchRequest
from lightning_mcore.engine_fields import (
    check_ddp_fields,
    check_optimizer_fields,
    ddp_fields,
    model_fields,
    optimizer_fields,
)
from lightning_mcore.environment import EnvironmentPlan, plan_environment, uses_of
from lightning_mcore.errors import ConfigurationError, SequenceParallelRefused
from lightning_mcore.experts import ExpertRequest, check_expert_config, choose_experts
from lightning_mcore.findings import Findings, raise_errors
from lightning_mcore.graphs import LayerGraphs
from lightning_mcore.hook_gradients import looks_at_gradients
from lightning_mcore.layout import Layout, resolve_layout
from lightning_mcore.nonfinite import NonFinite
from lightning_mcore.optimizer import build_training, optimizer_kind
from lightning_mcore.parallel_state import ParallelState
from lightning_mcore.plain import init_weights
from lightning_mcore.precision import MCorePrecision
from lightning_mcore.run import ModelRun
from lightning_mcore.stage import Pipeline
from lightning_mcore.state_dict import state_beside
from lightning_mcore.switches import (
    Facts,
    Switches,
    check_graphs_with_experts,
    plan_switches,
    resolve_switches,
    userbuffers_plan,
    validate,
    with_picked_vpp,
)
from lightning_mcore.topology import Topology
from lightning_mcore.topology_probe import FOUND, probe_topology
from lightning_mcore.userbuffers_plan import UserbuffersPlan
from lightning_mcore.version import installed_version
from lightning_mcore.watch.progress import Progress
from lightning_mcore.wrapping import trainable_names, wrap_chunks

_READ_BY_LIBRARIES = (
    "CUDA_",
    "NCCL_",
    "NUM_OF_HYBRID_EP_",
    "NVSHMEM_",
    "NVTE_",
    "PYTORCH_",
    "TORCH_DISTRIBUTED_DEBUG",
    "TORCH_NCCL_",
    "UB_",
)
"""Prefixes of environment variables that rules are about."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What the user asked of the strategy."""

    sizes: ParallelSizes
    switches: SwitchRequest
    experts: ExpertRequest = field(default_factory=ExpertRequest)
    dims: ModelDims = field(default_factory=ModelDims)
    """Dimensions that the LightningModule declares; known once there is one."""
    topology: Topology | None = None
    """The machines, where the user states them."""
    async_save: bool = False
    """Whether checkpoints are written while training goes on."""
    init_from: str | Path | None = None
    """Checkpoint to load weights from."""
    seq_length: int | None = None
    """Tokens per sample, where the model call does not show them."""
    per_token_loss: bool = False
    """Whether steps return a mean loss together with the number of tokens behind it."""
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
        ddp, optimizer = self.switches.ddp, self.switches.optimizer
        check_ddp_fields(ddp)
        check_optimizer_fields(optimizer)
        engine.check_field_names(ddp=ddp, optimizer=optimizer)

    def on_machines(
        self,
        device: torch.device,
        environ: Mapping[str, str],
        *,
        nodes: int,
        ranks_per_node: int,
    ) -> Request:
        """With the topology that a probe finds, unless the user has stated one or runs on CPU.

        Every node is taken to be like this one, so that all ranks decide alike.
        """
        stated = self.topology is not None and self.topology.source != FOUND
        if stated or device.type == "cpu":
            return self
        found = probe_topology(environ, nodes=nodes, ranks_per_node=ranks_per_node)
        if found.arch == "cpu":
            # There are GPUs, since the run is on one, but NVML does not tell about them.
            return dataclasses.replace(self, topology=None)
        return dataclasses.replace(self, topology=found)

    def facts(
        self,
        precision: MCorePrecision,
        device: torch.device,
        *,
        native: bool | None = None,
        optimizer: str | None = None,
        hooks_see_gradients: bool = False,
    ) -> Facts:
        """What is known about installation, hardware, model and optimizer; ``None`` if not yet."""
        return Facts(
            engine_version=engine.engine_version(),
            on_gpu=device.type != "cpu",
            precision=str(precision.precision),
            native_model=native,
            optimizer=optimizer,
            has_te_or_apex=engine.has_te_or_apex(),
            te_version=installed_version("transformer-engine"),
            torch_version=installed_version("torch") or (),
            has_fused_wgrad=find_spec("fused_weight_gradient_mlp_cuda") is not None,
            has_einops=find_spec("einops") is not None,
            torch_norms_only=self.torch_norms_only,
            per_token_loss=self.per_token_loss,
            hooks_see_gradients=hooks_see_gradients,
            dims=dataclasses.replace(self.dims, seq_length=self.seq_length or self.dims.seq_length),
            topology=self.topology,
            environment={k: v for k, v in os.environ.items() if k.startswith(_READ_BY_LIBRARIES)},
        )


@dataclass(frozen=True)
class Resolved:
    """What is settled before process groups exist."""

    layout: Layout
    switches: Switches
    """As far as they can be decided without the model."""
    environment: EnvironmentPlan
    """What they want of the environment: nothing on CPU, or on GPUs of which nothing is known."""
    userbuffers: UserbuffersPlan | None
    """Buffers to register before any layer is built."""
    te_wgrad: bool
    """Whether TransformerEngine's fused weight gradient is to stand in for Apex's."""


def resolve_before_groups(
    request: Request, facts: Facts, *, world_size: int, rank: int
) -> Resolved:
    """Validates everything that is known before process groups exist.

    Returns:
        Layout, switches as far as they are known, variables that they want, userbuffers to start.

    Raises:
        ConfigurationError: With all errors at once, on every rank alike.
    """
    sizes = with_picked_vpp(request.sizes, request.switches, facts.dims)
    layout = resolve_layout(sizes, world_size, rank)
    experts, of_experts = choose_experts(request.experts, layout, facts)
    raise_errors([*validate(request.switches, layout, facts), *of_experts])
    switches = resolve_switches(request.switches, layout, facts)
    found = Findings()
    check_graphs_with_experts(switches.cuda_graphs, experts.overlap_moe.effective, found)
    raise_errors(found.sorted())
    environment = plan_environment(uses_of(layout, switches, experts, facts), facts.environment)
    raise_errors(environment.findings)
    userbuffers = None
    if switches.tp_comm_overlap.effective:
        userbuffers = userbuffers_plan(request.switches, layout, facts, switches.sequence_parallel)
    te_wgrad = switches.gradient_accumulation_fusion.effective and not facts.has_fused_wgrad
    return Resolved(layout, switches, environment, userbuffers, te_wgrad)


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
    fields = model_fields(
        layout,
        switches,
        precision.engine_fields(native=native),
        device,
        per_token_loss=request.per_token_loss,
        userbuffers=request.switches.userbuffers if switches.tp_comm_overlap.effective else None,
    )
    experts, findings = choose_experts(request.experts, layout, facts)
    raise_errors(findings)
    return fields | experts.model_fields


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
        if request.switches.sequence_parallel != "auto" or fields["tp_comm_overlap"]:
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
    userbuffers: UserbuffersPlan | None = None,
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
        userbuffers: Those that were started.

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
    if userbuffers is not None:
        check_model(request.switches.userbuffers, inner)
    module.to(device)
    chunks, config = wrap_chunks(inner, pipeline, precision)
    if request.init_from is not None:
        init_weights(
            request.init_from,
            inner,
            beside=state_beside(module, pipeline),
            strict=module.strict_loading,
            layout=layout,
            groups=state.groups,
        )
    torch_optimizer = make_optimizer() if make_optimizer is not None else None
    kind = optimizer_kind(torch_optimizer) if torch_optimizer is not None else None
    facts = request.facts(
        precision,
        device,
        native=native,
        optimizer=kind,
        hooks_see_gradients=looks_at_gradients(module, module.trainer.callbacks),  # type: ignore[attr-defined]
    )
    switches, findings = plan_switches(request.switches, layout, facts)
    experts, of_experts = choose_experts(request.experts, layout, facts)
    findings = [*findings, *of_experts]
    raise_errors(findings)
    check_expert_config(
        config,
        layout,
        experts,
        plans=all(map(moe.has_schedule_plan, inner)),
        in_turn=any(map(moe.runs_experts_in_turn, inner)),
    )
    moe.mark_expert_parameters(inner, tp=layout.tp, etp=layout.etp)
    optimizer = None
    if torch_optimizer is not None:
        chunks, optimizer = build_training(
            chunks,
            config,
            torch_optimizer,
            trainable_names(inner),
            switches,
            ddp_fields(switches, request.switches.ddp) | experts.ddp_fields,
            optimizer_fields(
                switches, precision.optimizer_fields(native=native), request.switches.optimizer
            ),
        )
    graphs = None
    if kind_of_graphs := switches.cuda_graphs.effective:
        check_graphed_model(str(kind_of_graphs), config, inner)
        graphs = LayerGraphs(
            str(kind_of_graphs),
            chunks,
            config,
            None if optimizer is None else optimizer.engine,
            layout,
            overlap_param_gather=switches.overlap_param_gather.effective,
        )
    run = ModelRun(
        module=module,
        pipeline=pipeline,
        inner=inner,
        chunks=chunks,
        state=state,
        switches=switches,
        experts=experts,
        precision=precision,
        device=device,
        micro_batch_size=request.switches.micro_batch_size,
        seq_length=request.seq_length,
        findings=findings,
        per_token_loss=request.per_token_loss,
        userbuffers=userbuffers,
        graphs=graphs,
        optimizer=optimizer,
        progress=progress,
        nonfinite=request.nonfinite,
    )
    return run, facts
