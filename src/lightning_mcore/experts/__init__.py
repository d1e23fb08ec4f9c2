"""Expert parallelism: which dispatcher carries tokens, what is overlapped, and why.

Enters: what the user asked for, a layout and facts. Leaves: switches with their reasons, and
findings about what cannot work. The same rules plan layouts for machines that are not here. Pure.
"""

from lightning_mcore.experts.dispatcher import wants_probe
from lightning_mcore.experts.plan import ExpertPlan, plan_experts
from lightning_mcore.experts.probe import probe_deep_ep
from lightning_mcore.experts.resolve import check_expert_config, resolve_experts
from lightning_mcore.experts.setup import choose_experts
from lightning_mcore.experts.values import (
    Dispatcher,
    ExpertFacts,
    ExpertRequest,
    ExpertSwitches,
    FlexPackage,
    MoEDispatcher,
    OverlapMoE,
)

__all__ = [
    "Dispatcher",
    "ExpertFacts",
    "ExpertPlan",
    "ExpertRequest",
    "ExpertSwitches",
    "FlexPackage",
    "MoEDispatcher",
    "OverlapMoE",
    "check_expert_config",
    "choose_experts",
    "plan_experts",
    "probe_deep_ep",
    "resolve_experts",
    "wants_probe",
]
