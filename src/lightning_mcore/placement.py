"""Which expert-parallel rank holds which expert: pure arithmetic, no torch and no process group.

A layer has ``num_experts`` *slots*; rank ``r`` of ``ranks`` holds the ``num_experts // ranks``
consecutive ones from ``r * num_experts // ranks`` on. A placement is the tuple of experts by slot.
Loads are tokens per expert in any unit. All functions are deterministic: of equal loads, the expert
or rank with the lower number comes first, so every rank that knows the loads finds the same plan.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Literal, get_args

__all__ = [
    "Policy",
    "bound",
    "canonical",
    "check_policy",
    "imbalance",
    "keep_in_place",
    "place",
    "rank_loads",
]

Policy = Literal["contiguous", "round-robin", "serpentine", "lpt"]
Slots = tuple[int, ...]


def check_policy(policy: str) -> None:
    """Checks the name of a policy.

    Raises:
        ValueError: If there is none of that name.
    """
    if policy not in get_args(Policy):
        raise ValueError(f"`policy` ({policy!r}) must be one of {get_args(Policy)}.")


def canonical(num_experts: int) -> Slots:
    """The placement in which expert ``i`` is in slot ``i``: the engine's own."""
    return tuple(range(num_experts))


def place(load: Sequence[float], ranks: int, policy: Policy = "serpentine") -> Slots:
    """Deals experts to ranks; each rank gets equally many.

    Args:
        load: Tokens of each expert.
        ranks: Expert-parallel size; divides the number of experts.
        policy: ``contiguous`` keeps the canonical order. The others take experts from the most
            loaded to the least: ``round-robin`` deals them to ranks 0..R-1, 0..R-1, ...,
            ``serpentine`` to 0..R-1, R-1..0, ..., and ``lpt`` (longest processing time) gives each
            to the least loaded rank that has room. As equal counts can force ``lpt`` into a poor
            end, it takes the serpentine deal where that one is better.

    Returns:
        Experts by slot, in ascending order within each rank.

    Raises:
        ValueError: If ``ranks`` does not divide the number of experts.
    """
    check_policy(policy)
    _per_rank(load, ranks)
    deal = _DEALS[policy](load, ranks)
    if policy == "lpt":
        other = _serpentine(load, ranks)
        deal = min(deal, other, key=lambda bins: max(_sums(load, bins)))
    return tuple(expert for experts in deal for expert in sorted(experts))


def rank_loads(load: Sequence[float], slots: Sequence[int], ranks: int) -> list[float]:
    """Tokens of each rank under a placement."""
    size = _per_rank(load, ranks)
    return _sums(load, [slots[rank * size : (rank + 1) * size] for rank in range(ranks)])


def imbalance(load: Sequence[float], slots: Sequence[int], ranks: int) -> float:
    """Load of the fullest rank over the mean: 1 is even, ``ranks`` is all on one rank.

    1 where there is no load at all.
    """
    sums = rank_loads(load, slots, ranks)
    return max(sums) * ranks / sum(sums) if sum(sums) > 0 else 1.0


def bound(load: Sequence[float], ranks: int) -> float:
    """An imbalance below which no placement comes.

    Some rank holds at least the mean load, and some rank holds the hottest expert.
    """
    total = sum(load)
    return max(1.0, max(load) * ranks / total) if total > 0 else 1.0


def keep_in_place(slots: Sequence[int], current: Sequence[int], ranks: int) -> Slots:
    """The same experts on each rank, in an order in which fewest change their slot.

    An expert that stays on its rank keeps its slot of ``current``.
    """
    size = _per_rank(current, ranks)
    ordered: list[int] = []
    for start in range(0, len(slots), size):
        wanted = set(slots[start : start + size])
        before = current[start : start + size]
        arriving = iter(sorted(wanted - set(before)))
        ordered += [expert if expert in wanted else next(arriving) for expert in before]
    return tuple(ordered)


Bins = list[list[int]]


def _by_load(load: Sequence[float]) -> list[int]:
    return sorted(range(len(load)), key=lambda expert: (-load[expert], expert))


def _contiguous(load: Sequence[float], ranks: int) -> Bins:
    size = len(load) // ranks
    return [list(range(rank * size, (rank + 1) * size)) for rank in range(ranks)]


def _round_robin(load: Sequence[float], ranks: int) -> Bins:
    return [_by_load(load)[rank::ranks] for rank in range(ranks)]


def _serpentine(load: Sequence[float], ranks: int) -> Bins:
    bins: Bins = [[] for _ in range(ranks)]
    for place_, expert in enumerate(_by_load(load)):
        turn, rank = divmod(place_, ranks)
        bins[rank if turn % 2 == 0 else ranks - 1 - rank].append(expert)
    return bins


def _lpt(load: Sequence[float], ranks: int) -> Bins:
    bins: Bins = [[] for _ in range(ranks)]
    with_room: list[tuple[float, int]] = [(0.0, rank) for rank in range(ranks)]
    for expert in _by_load(load):
        total, rank = heapq.heappop(with_room)
        bins[rank].append(expert)
        if len(bins[rank]) < len(load) // ranks:
            heapq.heappush(with_room, (total + load[expert], rank))
    return bins


_DEALS: dict[str, Callable[[Sequence[float], int], Bins]] = {
    "contiguous": _contiguous,
    "round-robin": _round_robin,
    "serpentine": _serpentine,
    "lpt": _lpt,
}


def _sums(load: Sequence[float], bins: Sequence[Sequence[int]]) -> list[float]:
    return [float(sum(load[expert] for expert in experts)) for experts in bins]


def _per_rank(load: Sequence[float], ranks: int) -> int:
    size, rest = divmod(len(load), ranks)
    if rest or not size:
        raise ValueError(
            f"`ranks` ({ranks}) must divide the number of experts ({len(load)}), so that each rank"
            " gets equally many."
        )
    return size
