"""Rank arithmetic: properties of the grid, agreement with the engine, and every refusal."""

from __future__ import annotations

import warnings

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lightning_mcore.config import ModelDims, ParallelSizes
from lightning_mcore.errors import ConfigurationError
from lightning_mcore.layout import Axis, Layout, check_model_dims, pick_vpp, resolve_layout

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the engine announces what is not installed
    from megatron.core.parallel_state import RankGenerator

ENGINE_ORDER = "tp-cp-ep-dp-pp"
AXES: tuple[Axis, ...] = ("tp", "cp", "dp", "pp", "dp_cp", "ep", "etp", "edp")


@st.composite
def grids(draw: st.DrawFn) -> tuple[ParallelSizes, int]:
    """Sizes and a world that fits them, of at most 96 ranks."""
    small = st.integers(1, 4)
    tp, pp, cp, dp = draw(small), draw(small), draw(small), draw(small)
    world = tp * pp * cp * dp
    assume(world <= 96)
    per_stage = world // pp
    etp = draw(st.sampled_from([None, *_divisors(per_stage)]))
    ep = draw(st.sampled_from(_divisors(per_stage // (etp or tp))))
    vpp = draw(st.sampled_from([None, 1, 2, 3] if pp > 1 else [None, 1]))
    return ParallelSizes(tp=tp, pp=pp, vpp=vpp, cp=cp, ep=ep, etp=etp), world


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _all_ranks(sizes: ParallelSizes, world: int) -> list[Layout]:
    return [resolve_layout(sizes, world, rank) for rank in range(world)]


@given(grids())
@settings(max_examples=60, deadline=None)
def test_coordinates_are_a_bijection(grid: tuple[ParallelSizes, int]) -> None:
    layouts = _all_ranks(*grid)
    seen = {(one.tp_rank, one.cp_rank, one.dp_rank, one.pp_rank) for one in layouts}
    assert len(seen) == len(layouts)
    for one in layouts:
        assert 0 <= one.tp_rank < one.tp
        assert 0 <= one.cp_rank < one.cp
        assert 0 <= one.dp_rank < one.dp
        assert 0 <= one.pp_rank < one.pp
        assert 0 <= one.ep_rank < one.ep
        assert one.rank == one.tp_rank + one.tp * (
            one.cp_rank + one.cp * (one.dp_rank + one.dp * one.pp_rank)
        )


@given(grids())
@settings(max_examples=60, deadline=None)
def test_sizes_multiply_to_the_world(grid: tuple[ParallelSizes, int]) -> None:
    one = resolve_layout(*grid, 0)
    assert one.tp * one.cp * one.dp * one.pp == one.world_size
    assert one.etp * one.ep * one.edp * one.pp == one.world_size
    assert one.model_parallel_size * one.dp_cp == one.world_size


@given(grids(), st.sampled_from(AXES))
@settings(max_examples=80, deadline=None)
def test_groups_partition_the_world(grid: tuple[ParallelSizes, int], axis: Axis) -> None:
    layouts = _all_ranks(*grid)
    groups = {one.group_ranks(axis) for one in layouts}
    assert sorted(rank for group in groups for rank in group) == list(range(len(layouts)))
    for one in layouts:
        members = one.group_ranks(axis)
        assert members[getattr(one, f"{axis}_rank", members.index(one.rank))] == one.rank
        assert all(layouts[member].group_ranks(axis) == members for member in members)


@given(grids())
@settings(max_examples=60, deadline=None)
def test_groups_are_those_of_the_engine(grid: tuple[ParallelSizes, int]) -> None:
    layouts = _all_ranks(*grid)
    one = layouts[0]
    dense = RankGenerator(
        tp=one.tp, ep=1, dp=one.dp, pp=one.pp, cp=one.cp, order=ENGINE_ORDER, rank_offset=0
    )
    experts = RankGenerator(
        tp=one.etp, ep=one.ep, dp=one.edp, pp=one.pp, cp=1, order=ENGINE_ORDER, rank_offset=0
    )
    engine: dict[Axis, list[list[int]]] = {
        "tp": dense.get_ranks("tp"),
        "cp": dense.get_ranks("cp"),
        "dp": dense.get_ranks("dp"),
        "pp": dense.get_ranks("pp"),
        "dp_cp": dense.get_ranks("dp-cp"),
        "etp": experts.get_ranks("tp"),
        "ep": experts.get_ranks("ep"),
        "edp": experts.get_ranks("dp"),
    }
    for axis, groups in engine.items():
        assert {one.group_ranks(axis) for one in layouts} == {tuple(group) for group in groups}


def test_the_demo_layout_in_full() -> None:
    layouts = _all_ranks(ParallelSizes(tp=2, pp=2, vpp=2), 8)
    assert [(one.tp_rank, one.dp_rank, one.pp_rank) for one in layouts] == [
        (0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0),
        (0, 0, 1), (1, 0, 1), (0, 1, 1), (1, 1, 1),
    ]  # fmt: skip
    one = layouts[6]
    assert one.group_ranks("tp") == (6, 7)
    assert one.group_ranks("dp") == (4, 6)
    assert one.group_ranks("pp") == (2, 6)
    assert (one.num_stages, one.is_first_stage, one.is_last_stage) == (4, False, True)
    assert (layouts[1].is_first_stage, layouts[1].is_last_stage) == (True, False)


@pytest.mark.parametrize(
    ("vpp", "kept", "stages"), [(None, None, 2), (1, None, 2), (2, 2, 4), (3, 3, 6)]
)
def test_one_chunk_per_rank_is_no_interleaving(
    vpp: int | None, kept: int | None, stages: int
) -> None:
    layout = resolve_layout(ParallelSizes(pp=2, vpp=vpp), 2, 0)
    assert layout.vpp == kept
    assert layout.num_stages == stages


def test_a_single_stage_is_both_first_and_last() -> None:
    layout = resolve_layout(ParallelSizes(), 1, 0)
    assert layout.is_first_stage
    assert layout.is_last_stage
    assert layout.num_stages == 1


def test_expert_tensor_parallelism_follows_tp_unless_set() -> None:
    assert resolve_layout(ParallelSizes(tp=2, ep=2), 4, 0).etp == 2
    layout = resolve_layout(ParallelSizes(tp=2, ep=2, etp=1), 2, 1)
    assert (layout.etp, layout.ep_rank, layout.edp, layout.dp) == (1, 1, 1, 1)


@pytest.mark.parametrize(
    ("sizes", "world", "message"),
    [
        (
            ParallelSizes(tp=2, pp=2),
            6,
            "`world_size` (6) must be a multiple of `tp` (2) x `pp` (2) x `cp` (1) = 4;"
            " use 4 or 8 devices.",
        ),
        (
            ParallelSizes(tp=4, pp=2, cp=2),
            1,
            "`world_size` (1) must be a multiple of `tp` (4) x `pp` (2) x `cp` (2) = 16;"
            " use 16 or 32 devices.",
        ),
        (
            ParallelSizes(tp=2, ep=4),
            4,
            "`world_size` (4) must be a multiple of `etp` (2) x `ep` (4) x `pp` (1) = 8 for the"
            " experts; use 8 or 16 devices, or etp=1.",
        ),
        (
            ParallelSizes(tp=2, ep=3, etp=1),
            4,
            "`world_size` (4) must be a multiple of `etp` (1) x `ep` (3) x `pp` (1) = 3 for the"
            " experts; use 6 or 12 devices.",
        ),
    ],
)
def test_worlds_that_do_not_divide(sizes: ParallelSizes, world: int, message: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        resolve_layout(sizes, world, 0)
    assert str(error.value) == message


@given(grids(), st.integers(1, 100))
@settings(max_examples=60, deadline=None)
def test_devices_that_are_proposed_do_work(grid: tuple[ParallelSizes, int], world: int) -> None:
    sizes = grid[0]
    try:
        resolve_layout(sizes, world, 0)
    except ConfigurationError as error:
        words = str(error).split("; use ")[1].split(" devices")[0].split(" or ")
        if "for the experts" in str(error):
            assert all(resolve_layout(sizes, int(word), 0) for word in words)
        else:
            assert all(int(word) % (sizes.tp * sizes.pp * sizes.cp) == 0 for word in words)


@pytest.mark.parametrize("rank", [-1, 4, 5])
def test_ranks_outside_the_world(rank: int) -> None:
    with pytest.raises(ConfigurationError, match=rf"`rank` \({rank}\).*`world_size` \(4\)"):
        resolve_layout(ParallelSizes(tp=2), 4, rank)


@pytest.mark.parametrize(
    ("dims", "sizes", "sequence_parallel", "message"),
    [
        (
            ModelDims(num_layers=6),
            ParallelSizes(pp=2, vpp=2),
            False,
            "`num_layers` (6) must be a multiple of `pp` (2) x `vpp` (2) = 4; use 4 or 8 layers",
        ),
        (
            ModelDims(num_layers=3),
            ParallelSizes(pp=2),
            False,
            "`num_layers` (3) must be a multiple of `pp` (2) x `vpp` (1) = 2; use 2 or 4 layers",
        ),
        (
            ModelDims(num_attention_heads=6),
            ParallelSizes(tp=4),
            False,
            "`num_attention_heads` (6) must be a multiple of `tp` (4); use 4 or 8 heads, or tp=2.",
        ),
        (
            ModelDims(num_attention_heads=12, num_query_groups=6),
            ParallelSizes(tp=4),
            False,
            "`num_query_groups` (6) must be a multiple or a divisor of `tp` (4); use 4 or 8 groups,"
            " or tp=2.",
        ),
        (
            ModelDims(num_moe_experts=6),
            ParallelSizes(ep=4),
            False,
            "`num_moe_experts` (6) must be a multiple of `ep` (4); use 4 or 8 experts, or ep=2.",
        ),
        (
            ModelDims(seq_length=30),
            ParallelSizes(tp=4),
            True,
            "`seq_length` (30) must be a multiple of `tp` (4) x `cp` (1) = 4 for sequence"
            " parallelism; use 28 or 32 tokens, or sequence_parallel=False.",
        ),
        (
            ModelDims(seq_length=30),
            ParallelSizes(cp=2),
            False,
            "`seq_length` (30) must be a multiple of 2 x `cp` (2) = 4 for context parallelism;"
            " use 28 or 32 tokens.",
        ),
        (
            ModelDims(seq_length=12),
            ParallelSizes(tp=4, cp=2),
            True,
            "`seq_length` (12) must be a multiple of `tp` (4) x `cp` (2) = 8 for sequence",
        ),
    ],
)
def test_dimensions_that_do_not_divide(
    dims: ModelDims, sizes: ParallelSizes, sequence_parallel: bool, message: str
) -> None:
    with pytest.raises(ConfigurationError) as error:
        check_model_dims(dims, sizes, sequence_parallel=sequence_parallel)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("dims", "sizes", "sequence_parallel"),
    [
        (ModelDims(), ParallelSizes(tp=3, pp=5, cp=7), True),
        (ModelDims(num_layers=8), ParallelSizes(pp=2, vpp=2), False),
        (ModelDims(num_attention_heads=8, num_query_groups=2), ParallelSizes(tp=4), False),
        (ModelDims(num_attention_heads=8, num_query_groups=8), ParallelSizes(tp=4), False),
        (ModelDims(num_moe_experts=8), ParallelSizes(ep=4), False),
        (ModelDims(seq_length=30), ParallelSizes(tp=4), False),
        (ModelDims(seq_length=16), ParallelSizes(tp=4, cp=2), True),
    ],
)
def test_dimensions_that_divide(
    dims: ModelDims, sizes: ParallelSizes, sequence_parallel: bool
) -> None:
    check_model_dims(dims, sizes, sequence_parallel=sequence_parallel)


def test_dimensions_are_checked_against_a_layout_too() -> None:
    layout = resolve_layout(ParallelSizes(pp=2, vpp=1), 2, 0)
    check_model_dims(ModelDims(num_layers=2), layout)
    with pytest.raises(ConfigurationError, match=r"`pp` \(2\) x `vpp` \(1\) = 2"):
        check_model_dims(ModelDims(num_layers=3), layout)


@pytest.mark.parametrize(
    ("layers", "pp", "vpp"), [(4, 2, 2), (6, 2, 3), (8, 4, 2), (12, 2, 2), (12, 4, 3), (10, 2, 5)]
)
def test_pick_vpp_takes_the_smallest_that_divides(layers: int, pp: int, vpp: int) -> None:
    assert pick_vpp(ModelDims(num_layers=layers), pp) == vpp


@given(st.integers(1, 64), st.integers(2, 8))
@settings(deadline=None)
def test_pick_vpp_is_right_or_says_so(layers: int, pp: int) -> None:
    dims = ModelDims(num_layers=layers)
    fitting = [vpp for vpp in range(2, layers + 1) if layers % (pp * vpp) == 0]
    if fitting:
        assert pick_vpp(dims, pp) == fitting[0]
        return
    with pytest.raises(ConfigurationError) as error:
        pick_vpp(dims, pp)
    fix = str(error.value).split("; use ")[1]
    more_layers = int(fix.split(" layers")[0])
    assert more_layers > layers
    assert pick_vpp(ModelDims(num_layers=more_layers), pp) >= 2
    if "pp=" in fix:
        assert pick_vpp(dims, int(fix.split("pp=")[1].split(",")[0])) >= 2


@pytest.mark.parametrize(
    ("dims", "pp", "message"),
    [
        (ModelDims(num_layers=8), 1, r"`overlap_p2p` \(True\) needs `pp` \(1\) of at least 2"),
        (ModelDims(), 2, r"needs `vpp` \(None\) of at least 2.*model_dims = \{'num_layers'"),
        (
            ModelDims(num_layers=6),
            4,
            r"`num_layers` \(6\) to be a multiple of `pp` \(4\).*use 8 layers, pp=3, or overlap",
        ),
        (ModelDims(num_layers=2), 2, r"`num_layers` \(2\).*`pp` \(2\).*use 4 layers, or overlap"),
    ],
)
def test_pick_vpp_explains(dims: ModelDims, pp: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        pick_vpp(dims, pp)
