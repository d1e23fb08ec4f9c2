"""From resolved settings to what environment variables bear upon."""

from __future__ import annotations

from lightning_mcore.environment.values import Uses
from lightning_mcore.experts import ExpertSwitches
from lightning_mcore.layout import Layout
from lightning_mcore.switches import Facts, Switches

__all__ = ["uses_of"]


def uses_of(layout: Layout, switches: Switches, experts: ExpertSwitches, facts: Facts) -> Uses:
    """What a run with these settings does, on the machines of ``facts`` as far as known."""
    topology = facts.topology
    return Uses(
        arch="cpu" if not facts.on_gpu else topology.arch if topology else "unknown",
        nodes=topology.nodes if topology else 1,
        world_size=layout.world_size,
        splits_layers=(layout.tp > 1 or layout.cp > 1) and not facts.native_model,
        overlaps_data_parallel=bool(
            switches.overlap_grad_reduce.effective or switches.overlap_param_gather.effective
        ),
        overlaps_experts=experts.overlap_moe.effective == "1f1b",
        dispatcher=str(experts.moe_dispatcher.effective or "") if layout.ep > 1 else "",
        userbuffers=switches.tp_comm_overlap.effective,
        nccl_ub=switches.nccl_ub.effective,
        has_te=facts.te_version is not None,
        multicast=facts.multicast,
        torch_version=facts.torch_version,
    )
