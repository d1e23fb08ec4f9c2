"""Environment variables that decide whether communication overlaps: what is wanted, what is wrong.

Enters: what a run does (``Uses``) and a mapping of environment variables. Leaves: variables to be
set before CUDA starts, and findings about those that are set. Pure: nothing is read from or written
to the process; the launcher, the run header and ``lightning-mcore check`` act on the answer.

A value that the user has set always wins; the plan then only says what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Mapping

from lightning_mcore.environment.connections import check_connections, wanted_connections
from lightning_mcore.environment.rules import (
    check_missing,
    check_multicast,
    check_single,
    is_off,
)
from lightning_mcore.environment.uses import uses_of
from lightning_mcore.environment.values import (
    CONNECTIONS,
    EnvironmentPlan,
    Noted,
    Uses,
    Variable,
)
from lightning_mcore.experts import ExpertSwitches
from lightning_mcore.layout import Layout
from lightning_mcore.switches import Facts, Switches

__all__ = [
    "CONNECTIONS",
    "EnvironmentPlan",
    "Uses",
    "Variable",
    "environment_text",
    "in_words",
    "plan_environment",
    "shown",
    "uses_of",
]

_PREFIXES = ("NCCL_", "NVTE_", "TORCH_NCCL_", "UB_", "NVSHMEM_", "DEEP_EP_")
_OTHERS = (
    CONNECTIONS,
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN",
    "NVLINK_DOMAIN_SIZE",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_DISTRIBUTED_DEBUG",
    "USE_MNNVL",
)


def shown(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of ``environ`` that bear upon communication, by name."""
    return {
        name: environ[name]
        for name in sorted(environ)
        if name in _OTHERS or name.startswith(_PREFIXES)
    }


def plan_environment(uses: Uses, environ: Mapping[str, str]) -> EnvironmentPlan:
    """Says which variables ``uses`` want, and what is wrong in ``environ``."""
    if uses.arch == "cpu":
        return EnvironmentPlan(wanted=(), findings=())
    wanted: list[Variable] = []
    found = Noted(environ)

    def want(name: str, value: str, reason: str) -> None:
        wanted.append(Variable(name=name, value=value, reason=reason, current=environ.get(name)))

    connections = wanted_connections(uses)
    if connections is not None:
        want(CONNECTIONS, *connections)
    check_connections(uses, found)
    off = is_off(environ, "NCCL_NVLS_ENABLE")
    if off or not uses.multicast:
        reason = "NVLink multicast is off (NCCL_NVLS_ENABLE=0)"
        if not off:
            reason = "the topology states that NVLink multicast is off"
            want("NCCL_NVLS_ENABLE", "0", reason)
        want("UB_SKIPMC", "1", f"{reason}, and userbuffers would create it")
        if uses.dispatcher in ("deepep", "hybridep"):
            want("NVSHMEM_DISABLE_NVLS", "1", f"{reason}, and NVSHMEM would use it")
    check_multicast(uses, found)
    check_single(uses, found)
    check_missing(uses, found)
    return EnvironmentPlan(wanted=tuple(wanted), findings=tuple(found.all.sorted()))


def in_words(plan: EnvironmentPlan, environ: Mapping[str, str]) -> str:
    """What the run header says of an environment that cannot be changed any more."""
    parts = [f"{CONNECTIONS} {environ.get(CONNECTIONS, 'unset')}"]
    for variable in plan.wanted:
        if variable.unset:
            parts.append(
                f"{variable.name} should be {variable.value} from before the start:"
                f" {variable.reason}"
            )
        elif variable.name != CONNECTIONS:
            parts.append(f"{variable.name} {variable.current}")
    parts += [f.message.removesuffix(".") for f in plan.findings if f.severity != "info"]
    return "; ".join(parts)


def environment_text(
    layout: Layout, switches: Switches, experts: ExpertSwitches, facts: Facts
) -> str | None:
    """The run header's row on the environment; ``None`` on CPU."""
    uses = uses_of(layout, switches, experts, facts)
    if uses.arch == "cpu":
        return None
    text = in_words(plan_environment(uses, facts.environment), facts.environment)
    if uses.arch == "unknown":
        text += (
            "; what it should be depends on the GPUs, which are not known: pip install"
            " 'lightning-mcore[gpu]'"
        )
    return text
