"""Figures of synthetic timelines with known answers, against a count of points on a fine grid."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_mcore.errors import ConfigurationError
from lightning_mcore.timeline import (
    Interval,
    Mark,
    Timeline,
    analyse,
    ideal_bubble_share,
    load_timelines,
    merged_trace,
    step_window,
)
from lightning_mcore.timeline import intervals as arithmetic
from lightning_mcore.timeline.bandwidth import bus_bytes
from lightning_mcore.timeline.summary import advice, scalars, summarise

GROUPS = ("tp", "dp", "pp")


def interval(start, end, group=None, *, stream=0, kind=None, device=0, **more):
    kind = kind or ("communication" if group else "compute")
    return Interval(device, stream, start, end, kind, "k", group, **more)


def timeline(*intervals, marks=(), rank=0):
    return Timeline(rank, 1, tuple(intervals), tuple(marks))


# ---------------------------------------------------------------------------- against a grid

CELLS = 400
"""Points of the grid; ends of intervals are whole cells, so that a point is inside or outside."""


@st.composite
def random_timelines(draw):
    spans = st.tuples(
        st.integers(-20, CELLS + 20),
        st.integers(0, 120),
        st.sampled_from([None, "copy", *GROUPS]),
        st.integers(0, 3),
        st.sampled_from([0, 0, 0, 1]),
    )
    found = []
    for start, length, what, stream, device in draw(st.lists(spans, max_size=40)):
        group = what if what in GROUPS else None
        kind = "copy" if what == "copy" else None
        found.append(
            interval(start, start + length, group, kind=kind, stream=stream, device=device)
        )
    return timeline(*found)


def on_grid(line, device=0):
    """Cells of the window by what runs in them: a second way to the same figures."""
    cells = [set() for _ in range(CELLS)]
    for item in line.intervals:
        if item.device == device:
            for cell in range(max(int(item.start_us), 0), min(int(item.end_us), CELLS)):
                cells[cell].add(item.group if item.kind == "communication" else "compute")
    exposed = [cell for cell in cells if cell and "compute" not in cell]
    return {
        "compute": sum("compute" in cell for cell in cells),
        "exposed": len(exposed),
        "idle": sum(not cell for cell in cells),
        "communication": sum(bool(cell - {"compute"}) for cell in cells),
        "busy": {g: sum(g in cell for cell in cells) for g in GROUPS},
        "exposed_in": {g: sum(g in cell for cell in exposed) for g in GROUPS},
        "share": {g: sum(1 / len(cell) for cell in exposed if g in cell) for g in GROUPS},
    }


@settings(max_examples=200, deadline=None)
@given(random_timelines())
def test_figures_are_those_of_the_grid(line):
    expected = on_grid(line)
    found = analyse(line, (0, CELLS), device=0)
    close = pytest.approx
    assert found.compute_us == close(expected["compute"])
    assert found.exposed_us == close(expected["exposed"])
    assert found.idle_us == close(expected["idle"])
    assert found.communication_us == close(expected["communication"])
    assert found.compute_us + found.exposed_us + found.idle_us == close(found.step_us)
    for group in GROUPS:
        part = found.groups.get(group)
        assert (part.busy_us if part else 0) == close(expected["busy"][group])
        assert (part.exposed_us if part else 0) == close(expected["exposed_in"][group])
        assert (part.exposed_share_us if part else 0) == close(expected["share"][group])
    shares = sum(part.exposed_share_us for part in found.groups.values())
    assert shares == close(found.exposed_us)


spans = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda pair: (min(pair), max(pair))),
    max_size=12,
)


@given(spans, spans)
def test_set_arithmetic(first, second):
    def cells(found):
        return {cell for start, end in found for cell in range(start, end)}

    a, b = arithmetic.union(first), arithmetic.union(second)
    assert cells(a) == cells(first)
    assert all(x[1] < y[0] for x, y in itertools.pairwise(a)), "spans that touch are one"
    assert cells(arithmetic.subtract(a, b)) == cells(a) - cells(b)
    assert cells(arithmetic.intersect(a, b)) == cells(a) & cells(b)
    assert arithmetic.length(a) == len(cells(first))
    assert cells(arithmetic.clip(first, 10, 30)) == cells(first) & set(range(10, 30))


# --------------------------------------------------------------------------- by hand


def test_communication_is_covered_by_compute_on_any_other_stream():
    line = timeline(
        interval(0, 40, stream=1),
        interval(30, 60, stream=2),
        interval(20, 80, "dp", stream=9),
    )
    found = analyse(line, (0, 100))
    assert (found.compute_us, found.exposed_us, found.idle_us) == (60, 20, 20)
    assert found.groups["dp"].overlap == pytest.approx(40 / 60)
    assert found.overlap == pytest.approx(40 / 60)


def test_figures_are_means_over_steps():
    line = timeline(interval(0, 60), interval(60, 100, "tp"))
    found = analyse(line, (0, 200), steps=2)
    assert (found.step_us, found.compute_us, found.exposed_us, found.idle_us) == (100, 30, 20, 50)
    assert found.groups["tp"].operations == 0.5


def test_other_devices_do_not_count():
    line = timeline(interval(0, 10), interval(0, 5, device=0), interval(0, 90, "dp", device=1))
    assert analyse(line, (0, 100)).compute_us == 10
    assert "dp" not in analyse(line, (0, 100)).groups
    assert analyse(line, (0, 100), device=1).exposed_us == 90


def test_the_window_runs_to_the_end_of_the_devices_work():
    marks = [Mark("step", 10, 50), Mark("step", 60, 100), Mark("step", 15, 130, on_device=True)]
    line = timeline(interval(0, 20), interval(90, 140), marks=marks)
    assert step_window(line) == (10, 140)
    host = Timeline(0, 1, (interval(0, 300, device=-1),), tuple(marks))
    assert step_window(host) == (10, 100)
    assert step_window(timeline(interval(5, 20), interval(1, 2))) == (1, 20)


def test_what_cannot_be_analysed_is_said():
    with pytest.raises(ConfigurationError, match="no kernels"):
        analyse(timeline())
    with pytest.raises(ConfigurationError, match="end after it starts"):
        analyse(timeline(interval(0, 1)), (5, 5))
    with pytest.raises(ConfigurationError, match="`steps` \\(0\\)"):
        analyse(timeline(interval(0, 1)), steps=0)


def test_microbatches_are_counted_from_marks():
    marks = [
        Mark("forward", 10 * i, 10 * i + 5, stage=stage, microbatch=i % 4)
        for i, stage in enumerate([0, 0, 0, 0, 2, 2, 2, 2] * 2)
    ]
    line = timeline(interval(0, 200), marks=marks)
    assert analyse(line, (0, 200), steps=2).microbatches == 4
    assert analyse(timeline(interval(0, 200)), (0, 200)).microbatches is None


def test_bubble_is_idle_time_and_waiting_for_stages():
    line = timeline(interval(0, 50), interval(50, 70, "pp"), interval(60, 70, "dp"))
    assert analyse(line, (0, 100)).bubble_us == pytest.approx(30 + 15)
    more = timeline(*line.intervals, interval(80, 90, "world"), interval(90, 95, "mp"))
    assert analyse(more, (0, 100)).bubble_us == pytest.approx(30 + 15)


@pytest.mark.parametrize(
    ("pp", "vpp", "m", "share"),
    [(1, None, 8, 0.0), (2, None, 8, 1 / 9), (4, None, 4, 3 / 7), (4, 2, 8, 3 / 19)],
)
def test_ideal_bubble(pp, vpp, m, share):
    assert ideal_bubble_share(pp, vpp, m) == pytest.approx(share)


def simulated_bubble(pp, m):
    """Idle share of 1F1B with equal passes, by running it."""
    done = {}
    orders = []
    for stage in range(pp):
        warm = min(pp - 1 - stage, m)
        order = [("f", i) for i in range(warm)]
        for i in range(m - warm):
            order += [("f", warm + i), ("b", i)]
        orders.append(order + [("b", i) for i in range(m - warm, m)])
    clock, position = [0] * pp, [0] * pp
    while any(position[s] < len(orders[s]) for s in range(pp)):
        for stage in range(pp):
            if position[stage] == len(orders[stage]):
                continue
            what, i = orders[stage][position[stage]]
            before = stage - 1 if what == "f" else stage + 1
            needs = (what, i, before) if 0 <= before < pp else None
            if what == "b" and stage == pp - 1:
                needs = ("f", i, stage)
            if needs is None or needs in done:
                start = max(clock[stage], done.get(needs, 0))
                clock[stage] = done[(what, i, stage)] = start + 1
                position[stage] += 1
    return 1 - 2 * m / max(clock)


@pytest.mark.parametrize(("pp", "m"), [(2, 2), (2, 8), (4, 4), (4, 8), (8, 16)])
def test_ideal_bubble_is_that_of_a_schedule_that_runs(pp, m):
    assert ideal_bubble_share(pp, None, m) == pytest.approx(simulated_bubble(pp, m))


# --------------------------------------------------------------------------- bandwidth


@pytest.mark.parametrize(
    ("collective", "ranks", "factor"),
    [
        ("all_reduce", 4, 1.5),
        ("all_gather", 4, 0.75),
        ("reduce_scatter", 8, 0.875),
        ("all_to_all", 2, 0.5),
        ("broadcast", 4, 1.0),
        ("send_recv", None, 1.0),
        ("all_reduce", 1, 0.0),
    ],
)
def test_bus_bytes_follow_nccl_tests(collective, ranks, factor):
    assert bus_bytes(collective, 1000, ranks) == pytest.approx(1000 * factor)


def test_unknown_sizes_give_no_bandwidth():
    assert bus_bytes("all_reduce", None, 4) is None
    assert bus_bytes(None, 1000, 4) is None
    assert bus_bytes("all_reduce", 1000, None) is None
    found = analyse(timeline(interval(0, 10, "ep")), (0, 10))
    assert found.groups["ep"].busbw_gbps is None


def test_bandwidth_is_bytes_over_the_time_of_their_operations():
    line = timeline(
        interval(0, 10, "dp", collective="all_reduce", size=2_000_000, group_size=4),
        interval(5, 15, "dp", collective="all_gather", size=4_000_000, group_size=4),
        interval(20, 90, "dp"),  # of unknown size: its time must not count
    )
    part = analyse(line, (0, 100)).groups["dp"]
    assert analyse(line, (0, 100), steps=2).groups["dp"].algbw_gbps == part.algbw_gbps
    assert scalars([analyse(line, (0, 100))])["comm/dp/mbytes"] == pytest.approx(6.0)
    assert part.algbw_gbps == pytest.approx(6e6 / 20e-6 / 1e9)
    assert part.busbw_gbps == pytest.approx((2e6 * 1.5 + 4e6 * 0.75) / 20e-6 / 1e9)


# --------------------------------------------------------------------------- summaries


def three_ranks():
    return [
        analyse(timeline(interval(0, end), interval(end, 90, "pp")), (0, 100))
        for end in (50, 30, 70)
    ]


def test_ranks_are_told_apart_by_the_time_they_compute():
    chosen = summarise(three_ranks())
    assert (chosen.slowest, chosen.median, chosen.fastest) == (2, 0, 1)
    values = scalars(three_ranks(), ideal_bubble=0.2)
    assert values["compute/ms"] == pytest.approx(0.05)
    assert values["compute/ms/slowest_rank"] == pytest.approx(0.07)
    assert values["comm/pp/exposed_ms/fastest_rank"] == pytest.approx(0.06)
    assert values["comm/pp/share"] == pytest.approx(0.4)
    assert values["pipeline/bubble_share"] == pytest.approx(0.5)
    assert values["pipeline/ideal_bubble_share"] == 0.2
    assert not any("pipeline" in name for name in scalars(three_ranks()))


def test_ranks_without_a_group_log_the_same_names():
    with_dp = analyse(timeline(interval(0, 9), interval(9, 20, "dp")), (0, 20))
    without = analyse(timeline(interval(0, 20)), (0, 20))
    assert scalars([with_dp, without])["comm/dp/exposed_ms"] == pytest.approx(0.011)
    assert scalars([with_dp, without])["comm/dp/exposed_ms/slowest_rank"] == 0.0


def test_advice_names_the_costliest_group_and_a_switch_that_is_off():
    times = three_ranks()
    assert "pp communication costs most" in advice(times, {})
    assert "overlap_p2p=True, now off" in advice(times, {"overlap_p2p": False})
    assert "more microbatches" in advice(times, {"overlap_p2p": True})
    idle = [analyse(timeline(interval(0, 50)), (0, 100))]
    assert "idle time costs most" in advice(idle, {})
    assert "nothing but compute" in advice([analyse(timeline(interval(0, 99)), (0, 100))], {})
    assert "idle time costs most" in advice([analyse(timeline(interval(0, 95)), (0, 100))], {})


@pytest.mark.parametrize("collective", ["gather", "scatter"])
def test_bus_bytes_of_one_root_leave_its_own_part_out(collective):
    assert bus_bytes(collective, 1000, 4) == pytest.approx(750)


# --------------------------------------------------------------------------- merged traces


def test_a_merged_trace_gives_the_timelines_back(tmp_path):
    import json

    lines = [
        Timeline(
            rank,
            2,
            (
                interval(0, 30, stream=7),
                interval(10, 40, stream=8),
                interval(20, 60, "tp", collective="all_gather", size=8, group_size=2),
                interval(60, 70, "dp", kind="communication"),
            ),
            (
                Mark("step", 0, 70),
                Mark("forward", 0, 30, stage=rank, microbatch=0),
                Mark("forward", 1, 35, stage=rank, microbatch=0, on_device=True),
            ),
            origin_ns=1_000_000_000 + 5_000 * rank,
        )
        for rank in (0, 1)
    ]
    trace = merged_trace(lines, {0: "rank 0 (tp 0)"})
    path = tmp_path / "merged.json"
    path.write_text(json.dumps(trace))
    back = load_timelines([path])
    assert [line.rank for line in back] == [0, 1]
    assert back[1].intervals[0].start_us == 5.0, "rank 1 began 5 us later"
    assert back[0].intervals == tuple(sorted(lines[0].intervals, key=lambda i: i.start_us))
    assert back[0].marks == tuple(sorted(lines[0].marks, key=lambda m: (m.start_us, -m.end_us)))
    for line, again in zip(lines, back, strict=True):
        assert analyse(again).exposed_us == pytest.approx(analyse(line).exposed_us)
    rows = {
        (event["pid"], event["args"]["name"])
        for event in trace["traceEvents"]
        if event["name"] == "thread_name"
    }
    assert (0, "tp") in rows
    assert (0, "dp") in rows
    assert (0, "compute") in rows
    assert (0, "compute 2") in rows, "kernels that overlap each other need two rows"
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {"rank 0 (tp 0)", "rank 1"}


def test_events_of_a_row_never_cross():
    line = timeline(*[interval(3 * i, 3 * i + 10, stream=i % 5) for i in range(30)])
    events = [e for e in merged_trace([line], {})["traceEvents"] if e["ph"] == "X"]
    by_row = {}
    for event in events:
        by_row.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    for row in by_row.values():
        for (a, b), (c, d) in itertools.combinations(sorted(row), 2):
            assert c >= b or d <= b, f"{a, b} and {c, d} cross"
