"""Which GPUs are joined by what, as a value, and where the parallel groups then lie.

Enters: counts that a probe found or that the user states for machines he does not sit at. Leaves:
for each axis of the rank grid, whether its groups stay inside an NVLink domain or cross nodes.
Pure: 1,024 ranks need no process.

Ranks are taken to be numbered node by node, as every launcher does: rank ``r`` runs on node
``r // gpus_per_node`` and in NVLink domain ``r // gpus_per_nvlink_domain``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from lightning_mcore.errors import ConfigurationError
from lightning_mcore.layout import Axis, Layout

__all__ = ["Arch", "GroupPlace", "Network", "Reach", "Topology", "place_groups"]

Arch: TypeAlias = Literal["cpu", "ampere", "hopper", "blackwell"]
"""Generation of the GPUs; older ones count as ``"ampere"``."""

Network: TypeAlias = Literal["none", "infiniband", "ethernet", "unknown"]
"""What joins nodes: ``"infiniband"`` means any RDMA fabric (RoCE too), ``"ethernet"`` sockets."""

Reach: TypeAlias = Literal["alone", "nvlink", "node", "network"]
"""The slowest link inside a group: none, NVLink, PCIe inside a node, or the network."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """The machines of a run.

    Raises:
        ConfigurationError: If a count is not an integer of at least 1, domains and nodes do not
            fit into each other, or a name is unknown.
    """

    gpus_per_nvlink_domain: int = 8
    """GPUs that reach each other through NVLink: 8 on most servers, 72 on NVL72 racks (then also
    across nodes), 1 without NVLink."""
    nodes: int = 1
    """Hosts."""
    gpus_per_node: int = 8
    """GPUs (or, on CPU, processes) in each host."""
    arch: Arch = "hopper"
    """Generation of the GPUs."""
    network: Network = "unknown"
    """What joins the nodes."""
    multicast: bool = True
    """Whether NVLink multicast (NVLS) may be used; ``False`` where ``NCCL_NVLS_ENABLE=0``."""
    source: str = "stated"
    """Where the values come from: ``"stated"`` by the user, or what a probe read."""

    def __post_init__(self) -> None:
        for name in ("gpus_per_nvlink_domain", "nodes", "gpus_per_node"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigurationError(
                    f"`{name}` ({value!r}) of `topology` must be an integer of at least 1; use"
                    f" {name}=1 or more."
                )
        for name, known in (("arch", get_args(Arch)), ("network", get_args(Network))):
            value = getattr(self, name)
            if value not in known:
                raise ConfigurationError(
                    f"`{name}` ({value!r}) of `topology` must be one of {', '.join(known)}; use"
                    f" {name}={known[-1]!r}."
                )
        small, large = sorted((self.gpus_per_nvlink_domain, self.gpus_per_node))
        if large % small and self.nodes > 1:
            raise ConfigurationError(
                f"`gpus_per_nvlink_domain` ({self.gpus_per_nvlink_domain}) and `gpus_per_node`"
                f" ({self.gpus_per_node}) of `topology` must divide one another with `nodes`"
                f" ({self.nodes}) above 1, or ranks cannot be placed; use the GPUs of one domain"
                " that the job takes, for example 64 of an NVL72 rack."
            )

    @property
    def num_gpus(self) -> int:
        """GPUs of all nodes."""
        return self.nodes * self.gpus_per_node

    def node_of(self, rank: int) -> int:
        """The node that ``rank`` runs on."""
        return rank // self.gpus_per_node

    def domain_of(self, rank: int) -> int:
        """The NVLink domain of ``rank``'s GPU."""
        return rank // self.gpus_per_nvlink_domain

    def reach(self, ranks: Sequence[int]) -> Reach:
        """The slowest link among ``ranks``."""
        if len(ranks) == 1:
            return "alone"
        if self.arch != "cpu" and len({self.domain_of(rank) for rank in ranks}) == 1:
            return "nvlink"
        return "node" if len({self.node_of(rank) for rank in ranks}) == 1 else "network"


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupPlace:
    """Where the groups of one axis lie; the worst of them where they differ."""

    axis: Axis
    """The axis."""
    size: int
    """Ranks in each group."""
    count: int
    """Groups of the axis in the whole world."""
    reach: Reach
    """The slowest link in any of them."""
    nodes: int
    """The most nodes that one of them spans."""
    domains: int
    """The most NVLink domains that one of them spans."""

    @property
    def text(self) -> str:
        """In words, as the run header has it."""
        return {
            "alone": "one rank",
            "nvlink": "inside the NVLink domain",
            "node": "inside a node, without NVLink between all ranks",
            "network": f"crosses nodes ({self.nodes})",
        }[self.reach]


_AXES: tuple[Axis, ...] = ("tp", "cp", "dp", "dp_cp", "pp", "etp", "ep", "edp")
_ORDER: tuple[Reach, ...] = ("alone", "nvlink", "node", "network")


def place_groups(layout: Layout, topology: Topology) -> dict[Axis, GroupPlace]:
    """Places every group of every axis; no collective, and no process but this one is needed."""
    places: dict[Axis, GroupPlace] = {}
    for axis in _AXES:
        groups = layout.all_groups(axis)
        places[axis] = GroupPlace(
            axis=axis,
            size=len(groups[0]),
            count=len(groups),
            reach=max((topology.reach(ranks) for ranks in groups), key=_ORDER.index),
            nodes=max(len({topology.node_of(rank) for rank in ranks}) for ranks in groups),
            domains=max(len({topology.domain_of(rank) for rank in ranks}) for ranks in groups),
        )
    return places
