"""From resolved settings to what environment variables bear upon."""

from __future__ import annotations

from dataclasses import fields

from lightning_mcore.environment.values import Uses
from lightning_mcore.layout import Layout
from lightning_mcore.switches import Facts, Switches

__all__ = ["uses_of"]


def uses_of(layout: Layout, switches: Switches, facts: Facts) -> Uses:
    """What a run with these settings does, on the machines of ``facts`` as far as known."""
    topology = facts.topology
    # By name: families of switches that this version does not have are off.
    effective = {row.name: getattr(switches, row.name).effective for row in fields(switches)}
    return Uses(
        arch="cpu" if not facts.on_gpu else topology.arch if topology else "unknown",
        nodes=topology.nodes if topology else 1,
        world_size=layout.world_size,
        splits_layers=(layout.tp > 1 or layout.cp > 1) and not facts.native_model,
        overlaps_data_parallel=bool(
            effective["overlap_grad_reduce"] or effective["overlap_param_gather"]
        ),
        overlaps_experts=bool(effective.get("overlap_moe")),
        dispatcher=str(effective.get("moe_dispatcher") or ""),
        userbuffers=bool(effective.get("tp_comm_overlap")),
        fsdp=bool(effective.get("fsdp")),
        nccl_ub=bool(effective.get("nccl_ub")),
        has_te=facts.te_version is not None,
        multicast=facts.multicast,
        torch_version=facts.torch_version,
    )
