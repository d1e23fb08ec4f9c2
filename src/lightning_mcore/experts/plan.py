"""What expert parallelism would do on some machines: a plan, made without them.

Enters: the number of experts, sizes and a topology. Leaves: decisions with reasons, arithmetic and
warnings. Pure; ``lightning-mcore check`` prints it.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_mcore.config import ModelDims, ParallelSizes
from lightning_mcore.experts.resolve import resolve_experts
from lightning_mcore.experts.values import (
    ExpertFacts,
    ExpertRequest,
    ExpertSwitches,
    FlexPackage,
)
from lightning_mcore.findings import Finding, Findings
from lightning_mcore.layout import Layout, check_model_dims, resolve_layout
from lightning_mcore.topology import GroupPlace, Topology, place_groups

__all__ = ["ExpertPlan", "plan_experts"]

_FEW_EXPERTS = 2
"""With so few experts on a rank, the hottest one alone decides what the fullest rank gets."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertPlan:
    """What would run, and why. Made by ``plan_experts``."""

    layout: Layout
    """Sizes of the rank grid over all GPUs of the topology."""
    num_experts: int
    """Experts in each layer."""
    experts_per_rank: int
    """Experts of each layer that one rank holds."""
    place: GroupPlace
    """Where the expert-parallel groups lie."""
    switches: ExpertSwitches
    """Dispatcher and overlap with their reasons."""
    token_copies: float | None
    """Copies of a token's hidden vector that leave its rank in one dispatch, expected under even
    routing; ``None`` if ``topk`` was not told."""
    bytes_per_token: float | None
    """Bytes that a token costs its rank to send in one layer and one step: dispatch and combine,
    forward and backward, in bf16; ``None`` if ``topk`` or ``hidden_size`` was not told."""
    findings: tuple[Finding, ...]
    """Errors first, then warnings and hints."""

    @property
    def text(self) -> str:
        """The plan and its findings in a few lines."""
        said = [f"{finding.severity}: {finding.message}" for finding in self.findings]
        return "\n".join([*self.lines, *said])

    @property
    def lines(self) -> list[str]:
        """What would run, line by line."""
        s = self.switches
        lines = [
            f"experts: {self.num_experts} over ep {self.layout.ep} = {self.experts_per_rank} on a"
            f" rank, {self.layout.edp} copies of each; ep groups {self.place.text}",
        ]
        if self.bytes_per_token is not None:
            lines.append(
                f"traffic: {self.token_copies:.2f} copies of a token leave its rank,"
                f" {self.bytes_per_token / 1024:.0f} KiB per token and layer in a step"
            )
        lines += [
            f"{x.name}: {x.effective} ({x.reason})" for x in (s.moe_dispatcher, s.overlap_moe)
        ]
        return lines


def plan_experts(
    num_experts: int,
    ep: int,
    topology: Topology,
    *,
    tp: int = 1,
    pp: int = 1,
    vpp: int | None = None,
    etp: int | None = 1,
    topk: int | None = None,
    hidden_size: int | None = None,
    request: ExpertRequest | None = None,
    engine_version: tuple[int, ...] = (0, 19, 2),
    precision: str = "bf16-mixed",
    package: FlexPackage | None = None,
) -> ExpertPlan:
    """Plans expert parallelism over all GPUs of ``topology``.

    Args:
        num_experts: Experts in each layer.
        ep: Expert-parallel size.
        topology: The machines.
        tp: Tensor-parallel size.
        pp: Pipeline size.
        vpp: Chunks per pipeline rank.
        etp: Tensor-parallel size inside experts; ``None`` means like ``tp``.
        topk: Experts that each token goes to.
        hidden_size: Width of the activations.
        request: Settings; all ``"auto"`` by default.
        engine_version: Of megatron-core.
        precision: ``Trainer(precision=...)``.
        package: What is known of ``deep_ep`` there; ``None`` supposes that it can be used.

    Raises:
        ConfigurationError: If the sizes do not fit the machines or the experts. What is wrong with
            the other settings is among the plan's findings.
    """
    sizes = ParallelSizes(tp=tp, pp=pp, vpp=vpp, ep=ep, etp=etp)
    layout = resolve_layout(sizes, topology.num_gpus, 0)
    check_model_dims(ModelDims(num_moe_experts=num_experts), layout)
    findings = Findings()
    facts = ExpertFacts(
        engine_version=engine_version,
        on_gpu=topology.arch != "cpu",
        precision=precision,
        topology=topology,
        package=package
        or FlexPackage(version="supposed to be there", has_hybridep=True, has_nvshmem=True),
    )
    switches = resolve_experts(request or ExpertRequest(), layout, facts, findings)
    place = place_groups(layout, topology)["ep"]
    per_rank = num_experts // ep
    _note_placement(num_experts, ep, per_rank, findings)
    _note_size(ep, place, topology, findings)
    copies = None if topk is None else topk * (1.0 - 1.0 / ep)
    if switches.moe_dispatcher.effective == "allgather":
        copies = float(ep - 1)
    return ExpertPlan(
        layout=layout,
        num_experts=num_experts,
        experts_per_rank=per_rank,
        place=place,
        switches=switches,
        token_copies=copies,
        bytes_per_token=None if copies is None or hidden_size is None else copies * hidden_size * 8,
        findings=tuple(findings.sorted()),
    )


def _note_placement(num_experts: int, ep: int, per_rank: int, findings: Findings) -> None:
    """Warns where dealing experts to ranks by their load can do nothing, or little."""
    if ep == 1:
        return
    if per_rank == 1:
        relation = "leaves 1 expert on a rank: wherever it is placed, its load goes with it"
    elif per_rank <= _FEW_EXPERTS:
        relation = (
            f"leaves {per_rank} experts on a rank: the hottest expert alone keeps its rank fuller"
            " than the others, which no placement changes"
        )
    else:
        return
    findings.warning(
        "placement-useless",
        f"`ep` ({ep}) with `num_moe_experts` ({num_experts}) {relation}",
        f"balance the router instead (aux loss, expert bias), or use ep={max(ep // 4, 1)} where"
        " placement by load is to help",
        ep=ep,
        num_moe_experts=num_experts,
    )


def _note_size(ep: int, place: GroupPlace, topology: Topology, findings: Findings) -> None:
    """Hints at a smaller group that would stay inside the NVLink domain."""
    domain = topology.gpus_per_nvlink_domain
    if place.reach == "network" and 1 < domain < ep:
        findings.info(
            "ep-crosses-nodes",
            f"`ep` ({ep}) is more than the {domain} GPUs of an NVLink domain, so tokens cross the"
            " network in every expert layer",
            f"use ep={domain} if the experts of {domain} ranks fit their memory, or measure"
            " overlap_moe='1f1b'",
            ep=ep,
        )
