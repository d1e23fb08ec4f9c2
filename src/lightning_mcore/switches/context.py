"""Switches of context parallelism."""

from __future__ import annotations

from lightning_mcore.config import SwitchRequest
from lightning_mcore.findings import Findings
from lightning_mcore.layout import Layout
from lightning_mcore.switches.values import Facts, Switch
from lightning_mcore.topology import place_groups

__all__ = ["check_context_parallel", "cp_comm_type", "hierarchical_sizes"]

_TYPE = "cp_comm_type"


def check_context_parallel(layout: Layout, facts: Facts, findings: Findings) -> None:
    """Attention must exchange keys and values; the engine's own refuses when it is built."""
    if layout.cp > 1 and facts.native_model:
        findings.error(
            "context-parallel-needs-megatron-layers",
            f"`cp` ({layout.cp}) needs Megatron layers, and the model has only plain torch modules,"
            " whose attention would see one rank's part of each sequence",
            "use cp=1, or build the stages from Megatron layers with TransformerEngine's attention",
            cp=layout.cp,
        )


def cp_comm_type(
    request: SwitchRequest, layout: Layout, facts: Facts, findings: Findings
) -> Switch[str | None]:
    """How ranks that share a sequence exchange keys and values.

    The engine takes any string and checks no divisibility; TransformerEngine raises in the forward
    pass, or computes attention within each rank's part alone.
    """
    asked, cp = request.cp_comm_type, layout.cp
    if cp == 1:
        if asked is not None:
            findings.error(
                "cp-comm-type-needs-cp",
                f"`{_TYPE}` ({asked!r}) has no effect with `cp` (1)",
                f"use cp=2 or more, or {_TYPE}=None",
                cp_comm_type=asked,
                cp=cp,
            )
        return Switch(_TYPE, asked, None, "cp = 1")
    if asked is not None:
        _check_heads(asked, layout, facts, findings)
        return Switch(_TYPE, asked, asked, "requested")
    topology = facts.topology
    if topology is None:
        return Switch(_TYPE, None, "p2p", "the ring hides its transfers under attention", "doc")
    if place_groups(layout, topology)["cp"].reach == "network":
        inner = _inner_size(layout, facts)
        if inner > 1 and inner < cp:
            reason = f"cp crosses nodes: all-to-all among {inner} ranks, a ring of {cp // inner}"
            return Switch(_TYPE, None, "a2a+p2p", reason, "doc")
        return Switch(_TYPE, None, "p2p", "cp crosses nodes and heads do not divide", "doc")
    return Switch(_TYPE, None, "p2p", "the ring hides its transfers under attention", "doc")


def hierarchical_sizes(
    kind: Switch[str | None], layout: Layout, facts: Facts, findings: Findings
) -> Switch[tuple[int, ...] | None]:
    """Ranks of the inner and the outer level of ``a2a+p2p``; cannot be set.

    Without them the engine hands TransformerEngine no group, and every rank would attend to its own
    part alone: fast and wrong (checked in Megatron-LM's arguments.py only).
    """
    name = "hierarchical_context_parallel_sizes"
    if kind.effective != "a2a+p2p":
        return Switch(name, None, None, f"only for {_TYPE}='a2a+p2p'")
    inner = _inner_size(layout, facts)
    if inner == 1 or inner == layout.cp:
        findings.error(
            "hierarchical-cp-needs-two-levels",
            f"`{_TYPE}` ('a2a+p2p') needs `cp` ({layout.cp}) to split into two levels of at least 2"
            f" ranks, the inner one inside an NVLink domain with heads to divide, but the inner one"
            f" would have {inner}",
            f"use {_TYPE}='p2p', or " + ("'a2a'" if inner == layout.cp else "another cp"),
            cp_comm_type=kind.effective,
            cp=layout.cp,
            num_query_groups=facts.dims.num_query_groups,
        )
        return Switch(name, None, None, "refused")
    sizes = (inner, layout.cp // inner)
    return Switch(name, None, sizes, "the inner level fits the NVLink domain and the heads")


def _inner_size(layout: Layout, facts: Facts) -> int:
    """Largest divisor of ``cp`` whose ranks share an NVLink domain and divide the heads."""
    near = facts.topology.gpus_per_nvlink_domain if facts.topology is not None else 8
    for inner in range(layout.cp, 0, -1):
        fits = layout.cp % inner == 0 and layout.tp * inner <= near
        if fits and all(count % inner == 0 for count in _heads_per_rank(layout, facts)):
            return inner
    return 1


def _heads_per_rank(layout: Layout, facts: Facts) -> list[int]:
    heads, groups = facts.dims.num_attention_heads, facts.dims.num_query_groups
    known = [count for count in (heads, groups or heads) if count is not None]
    return [max(1, count // layout.tp) for count in known]


def _check_heads(kind: str, layout: Layout, facts: Facts, findings: Findings) -> None:
    """All-to-all hands whole heads around (TransformerEngine, context_parallel.py)."""
    if kind != "a2a":
        return
    for name in ("num_attention_heads", "num_query_groups"):
        count = getattr(facts.dims, name)
        if count is not None and (count % layout.tp or count // layout.tp % layout.cp):
            findings.error(
                "cp-all-to-all-needs-heads",
                f"`{_TYPE}` ('a2a') needs `{name}` ({count}) / `tp` ({layout.tp}) to be a multiple"
                f" of `cp` ({layout.cp}): it hands whole heads to the ranks",
                f"use {_TYPE}='p2p', or a smaller cp or tp",
                **{_TYPE: kind, name: count, "tp": layout.tp, "cp": layout.cp},
            )
