"""Where groups lie, computed for machines that are not there."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_mcore.config import ParallelSizes
from lightning_mcore.errors import ConfigurationError
from lightning_mcore.layout import resolve_layout
from lightning_mcore.topology import Topology, place_groups


def _reach(world: int, topology: Topology, **sizes: Any) -> dict[str, tuple[str, int]]:
    places = place_groups(resolve_layout(ParallelSizes(**sizes), world, 0), topology)
    return {axis: (place.reach, place.nodes) for axis, place in places.items()}


def test_1024_gpus_of_eight_per_node() -> None:
    got = _reach(1024, Topology(nodes=128), tp=8, pp=8)
    assert got["tp"] == ("nvlink", 1)
    assert got["dp"] == ("network", 16)
    assert got["pp"] == ("network", 8)
    assert got["cp"] == ("alone", 1)


def test_one_group_that_leaves_the_domain_decides() -> None:
    # tp 6 on nodes of 8: the first group lies inside, the second spans two nodes.
    topology = Topology(nodes=3)
    assert topology.reach(range(6)) == "nvlink"
    assert topology.reach(range(6, 12)) == "network"
    assert _reach(24, topology, tp=6)["tp"] == ("network", 2)


@pytest.mark.parametrize(
    ("topology", "world", "sizes", "tp", "ep"),
    [
        # NVL72: nodes of 4 GPUs share a domain; 64 of the 72 are used.
        (Topology(gpus_per_nvlink_domain=64, nodes=32, gpus_per_node=4, arch="blackwell"), 128,
         {"tp": 8, "ep": 64, "etp": 1}, ("nvlink", 2), ("nvlink", 16)),
        # Pairs of GPUs bridged, the pairs joined by PCIe.
        (Topology(gpus_per_nvlink_domain=2, gpus_per_node=8), 8, {"tp": 4}, ("node", 1),
         ("alone", 1)),
        (Topology(gpus_per_nvlink_domain=1, gpus_per_node=8), 8, {"tp": 2}, ("node", 1),
         ("alone", 1)),
        # Processes on CPU have no NVLink whatever is said.
        (Topology(arch="cpu", gpus_per_node=8), 8, {"tp": 8}, ("node", 1), ("alone", 1)),
        (Topology(nodes=4), 32, {"ep": 16}, ("alone", 1), ("network", 2)),
    ],
)  # fmt: skip
def test_kinds_of_machines(
    topology: Topology, world: int, sizes: dict[str, Any], tp: Any, ep: Any
) -> None:
    got = _reach(world, topology, **sizes)
    assert got["tp"] == tp
    assert got["ep"] == ep


@pytest.mark.parametrize("axis", ["tp", "cp", "dp", "dp_cp", "pp", "etp", "ep", "edp"])
def test_groups_of_an_axis_cut_the_world(axis: Any) -> None:
    layout = resolve_layout(ParallelSizes(tp=2, pp=2, cp=2, ep=4, etp=1), 32, 5)
    groups = layout.all_groups(axis)
    assert sorted(rank for ranks in groups for rank in ranks) == list(range(32))
    assert layout.group_ranks(axis) in groups
    for rank in range(32):
        other = resolve_layout(ParallelSizes(tp=2, pp=2, cp=2, ep=4, etp=1), 32, rank)
        assert other.group_ranks(axis) in groups


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"nodes": 0}, r"`nodes` \(0\) of `topology`"),
        ({"gpus_per_node": True}, r"`gpus_per_node` \(True\)"),
        ({"arch": "pascal"}, r"`arch` \('pascal'\).*cpu, ampere, hopper, blackwell"),
        ({"network": "token ring"}, r"`network` \('token ring'\)"),
        ({"gpus_per_nvlink_domain": 72, "gpus_per_node": 16, "nodes": 9}, r"divide one another"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        Topology(**arguments)
