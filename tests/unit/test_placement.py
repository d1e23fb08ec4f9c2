"""Placement of experts: permutations of equal counts, within bounds, as good as they say."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from benchmarks.expert_placement import BOUND, POLICIES, simulate
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_mcore import placement

SLACK = 1e-9
"""Rounding of sums in another order."""


@st.composite
def layers(draw, max_ranks=8, max_each=6):
    """Loads of a layer and a number of ranks that divides it; many ties and idle experts."""
    ranks = draw(st.integers(1, max_ranks))
    each = draw(st.integers(1, max_each))
    load = draw(
        st.lists(
            st.integers(0, 6) | st.integers(0, 10**6), min_size=ranks * each, max_size=ranks * each
        )
    )
    return load, ranks


def best_imbalance(load, ranks):
    """The lowest imbalance of all placements, by trying them all."""
    size = len(load) // ranks

    def fullest(left, most):
        if not left:
            return most
        first, *rest = left
        return min(
            fullest(
                [e for e in rest if e not in others],
                max(most, load[first] + sum(load[e] for e in others)),
            )
            for others in itertools.combinations(rest, size - 1)
        )

    return fullest(list(range(len(load))), 0) * ranks / sum(load) if sum(load) else 1.0


@given(layers(), st.sampled_from(POLICIES))
def test_a_placement_is_a_permutation_with_equal_counts(layer, policy):
    load, ranks = layer
    slots = placement.place(load, ranks, policy)
    assert sorted(slots) == list(range(len(load)))
    assert slots == placement.place(tuple(load), ranks, policy)
    assert sum(placement.rank_loads(load, slots, ranks)) == pytest.approx(sum(load))


@given(layers())
def test_no_policy_is_below_the_bound_or_above_its_own(layer):
    load, ranks = layer
    found = {p: placement.imbalance(load, placement.place(load, ranks, p), ranks) for p in POLICIES}
    low = placement.bound(load, ranks)
    assert all(low <= value + SLACK for value in found.values())
    assert all(value <= ranks + SLACK for value in found.values())
    # In each turn every rank gets one expert, and no later turn has a hotter one: the differences
    # of all turns add up to no more than that of the hottest and the coldest expert.
    mean = sum(load) / ranks
    spread = (max(load) - min(load)) / mean if mean else 0.0
    assert found["round-robin"] <= 1 + spread + SLACK
    # Rank 0 of round-robin gets the hottest of each turn.
    assert found["serpentine"] <= found["round-robin"] + SLACK
    assert found["lpt"] <= found["serpentine"] + SLACK


@settings(max_examples=60)
@given(layers(max_ranks=3, max_each=3))
def test_against_all_placements(layer):
    load, ranks = layer
    best = best_imbalance(load, ranks)
    assert placement.bound(load, ranks) <= best + SLACK
    for policy in POLICIES:
        slots = placement.place(load, ranks, policy)
        assert placement.imbalance(load, slots, ranks) >= best - SLACK
    if len(load) == 2 * ranks:
        # With two experts per rank, hottest with coldest is the best there is.
        slots = placement.place(load, ranks, "serpentine")
        assert placement.imbalance(load, slots, ranks) == pytest.approx(best)


def test_lpt_finds_what_serpentine_does_not():
    load = [9, 8, 7, 3, 2, 1]
    assert best_imbalance(load, 2) == pytest.approx(16 / 15)
    assert placement.imbalance(load, placement.place(load, 2, "lpt"), 2) == pytest.approx(16 / 15)
    assert placement.place(load, 2, "serpentine") == (0, 3, 4, 1, 2, 5)


def test_lpt_takes_the_serpentine_deal_where_equal_counts_mislead_it():
    load = [4, 3, 3, 3, 3, 3, 3, 3, 2, 2, 1, 0]
    own = placement._sums(load, placement._lpt(load, 3))
    serpentine = placement.rank_loads(load, placement.place(load, 3, "serpentine"), 3)
    assert max(own) > max(serpentine)
    assert placement.place(load, 3, "lpt") == placement.place(load, 3, "serpentine")


def test_order_of_the_deals():
    load = [8, 7, 6, 5, 4, 3, 2, 1]
    assert placement.place(load, 4, "contiguous") == tuple(range(8))
    assert placement.place(load, 4, "round-robin") == (0, 4, 1, 5, 2, 6, 3, 7)
    assert placement.place(load, 4, "serpentine") == (0, 7, 1, 6, 2, 5, 3, 4)
    assert placement.place([1] * 8, 4, "serpentine") == (0, 7, 1, 6, 2, 5, 3, 4)


def test_no_tokens_are_no_imbalance():
    assert placement.imbalance([0, 0], (0, 1), 2) == placement.bound([0, 0], 2) == 1.0


@given(layers(), st.randoms(use_true_random=False))
def test_experts_that_stay_on_a_rank_keep_their_slot(layer, random):
    load, ranks = layer
    size = len(load) // ranks
    current = list(range(len(load)))
    random.shuffle(current)
    wanted = placement.place(load, ranks)
    kept = placement.keep_in_place(wanted, current, ranks)
    for start in range(0, len(load), size):
        part = slice(start, start + size)
        assert set(kept[part]) == set(wanted[part])
        staying = set(current[part]) & set(wanted[part])
        assert all(
            kept[i] == current[i] for i in range(start, start + size) if current[i] in staying
        )
    assert placement.keep_in_place(kept, kept, ranks) == kept


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"`ranks` \(3\) must divide the number of experts \(8\)"):
        placement.place([1.0] * 8, 3)
    with pytest.raises(ValueError, match=r"`policy` \('snake'\) must be one of"):
        placement.place([1.0] * 8, 4, "snake")


def test_the_benchmark_gives_the_reference_figures():
    """128 experts, top 8: figures that were found with another program, from the same seed."""
    rows = simulate(
        skews=[0.3, 0.7], ranks=[8, 32, 64], experts=128, top_k=8, tokens=20_000, repeats=5, seed=0
    )
    found = {(row["skew"], row["ep"]): row["imbalance"] for row in rows}
    expected = {
        (0.3, 8): (1.106, 1.045, 1.011, 1.004),
        (0.7, 32): (2.035, 1.709, 1.523, 1.244),
        (0.7, 64): (2.642, 2.452, 2.116, 2.116),
    }
    for case, values in expected.items():
        assert tuple(round(found[case][policy], 3) for policy in POLICIES) == values, case
    # With two experts per rank the hottest alone is nearly all there is.
    assert np.isclose(found[0.7, 64][BOUND], 2.05, atol=0.005)
