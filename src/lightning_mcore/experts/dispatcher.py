"""What moves tokens to the ranks of their experts."""

from __future__ import annotations

from lightning_mcore.experts.values import (
    ExpertFacts,
    ExpertRequest,
    Obstacle,
    is_rack,
    is_spread,
    place_of,
)
from lightning_mcore.findings import Findings
from lightning_mcore.layout import Layout
from lightning_mcore.switches import Switch

__all__ = ["choose_dispatcher", "wants_probe"]

_HINT = (
    "build it from github.com/deepseek-ai/DeepEP for your torch and CUDA (it has no official"
    " package on PyPI)"
)


def wants_probe(request: ExpertRequest, layout: Layout, facts: ExpertFacts) -> bool:
    """Whether the choice depends on the package ``deep_ep``: probing starts a process."""
    if not facts.on_gpu or layout.ep * layout.etp == 1:
        return False
    if request.moe_dispatcher in ("deepep", "hybridep"):
        return True
    place = place_of(layout, facts.topology)
    return request.moe_dispatcher == "auto" and place is not None and is_spread(place, facts)


def choose_dispatcher(
    request: ExpertRequest, layout: Layout, facts: ExpertFacts, findings: Findings
) -> Switch[str | None]:
    """The dispatcher; ``None`` leaves it to the model's own config."""
    name, asked = "moe_dispatcher", request.moe_dispatcher
    if asked in ("deepep", "hybridep"):
        for o in _obstacles(asked, layout, facts):
            findings.error(
                o.code, f"`moe_dispatcher` ({asked!r}) {o.relation}", o.fix, moe_dispatcher=asked
            )
        version = facts.package.version if facts.package else None
        return Switch(name, asked, asked, "requested" + (f"; deep_ep {version}" if version else ""))
    if asked != "auto":
        return Switch(name, asked, asked, "requested")
    if layout.ep == 1:
        return Switch(name, asked, None, "ep = 1: as the model's own config says")
    if not facts.on_gpu:
        return Switch(name, asked, "alltoall", "on CPU")
    place = place_of(layout, facts.topology)
    if place is None:
        return Switch(name, asked, "alltoall", "where the groups lie is not known")
    where = f"ep group {place.text}"
    if not is_spread(place, facts):
        return Switch(name, asked, "alltoall", where)
    wanted = "hybridep" if is_rack(facts.topology) else "deepep"
    if wanted == "deepep" and facts.topology is not None and facts.topology.arch != "hopper":
        reason = f"{where}, but DeepEP is the better choice on Hopper only"
        return Switch(name, asked, "alltoall", reason)
    if facts.package is None:
        return Switch(name, asked, "alltoall", f"{where}; nobody looked for deep_ep")
    obstacles = _obstacles(wanted, layout, facts)
    if obstacles:
        return Switch(name, asked, "alltoall", f"{where}; {wanted} {obstacles[0].relation}")
    return Switch(name, asked, wanted, f"{where}; deep_ep {facts.package.version} can be used")


def _obstacles(backend: str, layout: Layout, facts: ExpertFacts) -> list[Obstacle]:
    """What keeps DeepEP or HybridEP from working: code, relation and fix of each."""
    found: list[Obstacle] = []
    instead = "use moe_dispatcher='alltoall'"
    if layout.ep * layout.etp == 1:
        found.append(
            Obstacle(
                "dispatcher-needs-ep",
                f"needs `ep` ({layout.ep}) of at least 2: one rank sends tokens to nobody",
                "use ep=2 or more, or moe_dispatcher='auto'",
            )
        )
    if not facts.precision.startswith("bf16"):
        found.append(
            Obstacle(
                "dispatcher-needs-bf16",
                f"sends bf16, and `precision` is {facts.precision!r}",
                f"use Trainer(precision='bf16-mixed'), or {instead.removeprefix('use ')}",
            )
        )
    if not facts.on_gpu:
        found.append(
            Obstacle("dispatcher-needs-gpu", "needs GPUs, and this run is on CPU", instead)
        )
        return found
    topology = facts.topology
    if topology is not None:
        if topology.arch not in ("hopper", "blackwell"):
            found.append(
                Obstacle(
                    "dispatcher-needs-hopper",
                    f"needs GPUs of the Hopper or Blackwell generation, and these are"
                    f" {topology.arch}",
                    instead,
                )
            )
        if backend == "deepep" and is_rack(topology) and layout.ep > topology.gpus_per_node:
            found.append(
                Obstacle(
                    "deepep-without-mnnvl",
                    f"cannot use an NVLink domain that spans nodes (MNNVL:"
                    f" {topology.gpus_per_nvlink_domain} GPUs over nodes of"
                    f" {topology.gpus_per_node})",
                    "use moe_dispatcher='hybridep' or 'alltoall'",
                )
            )
    found += _package_obstacles(backend, layout, facts, instead)
    return found


def _package_obstacles(
    backend: str, layout: Layout, facts: ExpertFacts, instead: str
) -> list[Obstacle]:
    package = facts.package
    if package is None:
        return []
    if package.version is None:
        return [
            Obstacle(
                "deep-ep-missing",
                f"needs the package deep_ep, which cannot be used: {package.problem}",
                f"{_HINT}, or {instead}",
            )
        ]
    if backend == "hybridep":
        if package.has_hybridep:
            return []
        return [
            Obstacle(
                "hybridep-missing",
                f"needs HybridEPBuffer, which deep_ep {package.version} does not have",
                f"build DeepEP's branch hybrid-ep, or {instead}",
            )
        ]
    place = place_of(layout, facts.topology)
    if place is not None and place.nodes > 1 and not package.has_nvshmem:
        return [
            Obstacle(
                "deepep-without-nvshmem",
                f"needs NVSHMEM between the {place.nodes} nodes of an expert-parallel group, and"
                f" deep_ep {package.version} was built without it",
                f"build DeepEP with NVSHMEM_DIR set, or {instead}",
            )
        ]
    return []
