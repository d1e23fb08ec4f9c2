"""The report of the benchmark for several GPUs, on made-up rows."""

from __future__ import annotations

import importlib
import statistics
from pathlib import Path
from typing import Any

import pytest

from lightning_mcore.flops import peak_flops

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SETTING = {"gpu": "NVIDIA H200", "devices": 2}


@pytest.fixture
def as_markdown(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("multigpu.report").as_markdown


def recorded(step_ms: float, compute_ms: float, **exposed_ms: float) -> dict[str, Any]:
    everything = sum(exposed_ms.values())
    return {
        "step_us": 1e3 * step_ms,
        "compute_us": 1e3 * compute_ms,
        "exposed_us": 1e3 * everything,
        "idle_us": 1e3 * (step_ms - compute_ms - everything),
        "groups": {name: {"exposed_us": 1e3 * ms} for name, ms in exposed_ms.items()},
    }


def made_up(
    item: str,
    case: str,
    step_ms: float,
    *,
    against: dict[str, Any] | None = None,
    group: str = "made up",
    microbatches: int = 1,
    ranks: int = 2,
    times: list[dict[str, Any]] | None = None,
    strategy: dict[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """A measured row; ``against`` is its baseline, without which it is one."""
    strategy = strategy or {}
    row = {
        "item": item,
        "group": group,
        "case": case,
        "status": "measured",
        "is_baseline": against is None,
        "pp": strategy.get("pp", 1),
        "vpp": strategy.get("vpp", 1),
        "micro_batch": 1,
        "framework": "mcore",
        "strategy": {name: repr(value) for name, value in strategy.items()},
        "microbatches": microbatches,
        "step_ms": [step_ms],
        "median_step_ms": step_ms,
        "tokens_per_s": 1e6 / step_ms,
        "tflops_per_gpu": 400.0,
        "peak_gib": 10.0,
        "losses": [],
        "recorded": times,
        "lateness": None,
        "switches": None,
        "parameters_by_rank": [1] * ranks,
        **more,
    }
    if against is not None:
        row["baseline"] = against["case"]
        row["ratios"] = [step_ms / against["median_step_ms"]]
        row["ratio"] = statistics.median(row["ratios"])
    return row


def tables(text: str) -> dict[str, list[dict[str, str]]]:
    """By title, the rows of each table by column."""
    found = {}
    for part in text.split("### ")[1:]:
        title, *lines = part.splitlines()
        cells = [
            [cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line
        ]
        if cells:
            head, _, *rest = cells
            found[title] = [dict(zip(head, line, strict=True)) for line in rest]
    return found


def reached(found: dict[str, list[dict[str, str]]]) -> dict[str, tuple[str, str, str]]:
    lines = found["Against the targets"]
    assert len({line["what"] for line in lines}) == len(lines)
    return {line["what"]: (line["measured"], line["target"], line["met"]) for line in lines}


def test_pipelines_are_compared_with_the_bubble_arithmetic(as_markdown):
    # 100 ms of compute with 4 microbatches: ideally 125 ms, and 106.25 ms at vpp=4.
    base = made_up(
        *("pp", "1F1B", 130.0),
        microbatches=4,
        strategy={"pp": 2},
        times=[recorded(131.0, 98.0, pp=20.0), recorded(131.0, 100.0, pp=25.0)],
    )
    interleaved = {"pp": 2, "vpp": 4, "overlap_p2p": True}
    good = made_up(
        *("pp", "vpp 4", 110.0),
        against=base,
        microbatches=4,
        strategy=interleaved,
        times=[recorded(112.0, 99.0, pp=1.0), recorded(112.0, 100.0, pp=2.0)],
    )
    slow = made_up(
        "pp", "slow", 122.0, against=base, microbatches=4, strategy={**interleaved, "vpp": 2}
    )
    apart = made_up(
        *("pp", "no overlap", 120.0),
        against=base,
        microbatches=4,
        strategy={**interleaved, "overlap_p2p": False},
    )
    many = made_up("pp", "1F1B", 225.0, microbatches=8, strategy={"pp": 2})
    found = tables(as_markdown({"setting": SETTING, "rows": [good, slow, apart, base, many]}))
    by_case = {(row["case"], row["m"]): row for row in found["pp: made up"]}
    first = by_case["1F1B (baseline)", "4"]
    # 130 ms beyond the 100 ms of the slowest stage; 130 / 125 = 1.04.
    assert (first["bubble"], first["ideal"], first["step off"]) == ("0.300", "0.250", "+4.0 %")
    assert (first["expected"], first["off"]) == ("-", "-")
    vpp4 = by_case["vpp 4", "4"]
    # (1 + 1/16) / (1 + 1/4) = 0.85; 110 / 130 = 0.846; 110 / 106.25 = 1.035.
    assert (vpp4["expected"], vpp4["off"]) == ("0.850", "-0.5 %")
    assert (vpp4["bubble"], vpp4["ideal"], vpp4["step off"]) == ("0.100", "0.062", "+3.5 %")
    # (1 + 1/8) / (1 + 1/4) = 0.9; 122 / 130 = 0.938.
    assert (by_case["slow", "4"]["expected"], by_case["slow", "4"]["off"]) == ("0.900", "+4.3 %")
    assert (by_case["slow", "4"]["bubble"], by_case["slow", "4"]["step off"]) == ("-", "-")
    assert by_case["1F1B (baseline)", "8"]["ideal"] == "0.125"

    lines = reached(found)
    assert lines == {
        "vpp 4, 4 microbatches: time of 1F1B": (
            "0.846 (1.182 x as fast), -0.5 %",
            "0.850 (1.176 x), within 5 %",
            "yes",
        ),
        "slow, 4 microbatches: time of 1F1B": (
            "0.938 (1.066 x as fast), +4.3 %",
            "0.900 (1.111 x), within 5 %",
            "yes",
        ),
    }
    slow["ratio"] = 0.946  # 5.1 % above 0.9
    assert reached(tables(as_markdown({"setting": SETTING, "rows": [slow, base]}))) == {
        "slow, 4 microbatches: time of 1F1B": (
            "0.946 (1.057 x as fast), +5.1 %",
            "0.900 (1.111 x), within 5 %",
            "no",
        )
    }


def test_megatron_is_compared_with_lightnings_ddp_and_its_fastest(as_markdown):
    ddp = made_up("dp", "Lightning DDP", 110.0, framework="ddp")
    rows = [
        ddp,
        made_up("dp", "larger buckets", 104.5, against=ddp, framework="ddp"),
        made_up("dp", "plain", 90.0, against=ddp, strategy={"use_distributed_optimizer": False}),
        made_up("dp", "all", 100.0, against=ddp, strategy={"use_distributed_optimizer": True}),
        made_up("dp", "more", 101.0, against=ddp, strategy={"use_distributed_optimizer": True}),
        # Not what Lightning's DDP does.
        made_up(
            *("dp", "bf16", 89.0),
            against=ddp,
            strategy={"use_distributed_optimizer": True, "grad_reduce_in_fp32": False},
        ),
    ]
    lines = reached(tables(as_markdown({"setting": SETTING, "rows": rows})))
    assert lines == {
        "all: tokens/s beyond Lightning DDP": ("+10.0 %", "at least 10 %", "yes"),
        "all: tokens/s beyond larger buckets": ("+4.5 %", "-", "-"),
    }
    rows[3]["ratio"], rows[4]["ratio"] = 0.95, 0.93
    lines = reached(tables(as_markdown({"setting": SETTING, "rows": rows})))
    assert lines["more: tokens/s beyond Lightning DDP"] == ("+7.5 %", "at least 10 %", "no")


def test_userbuffers_are_compared_with_nccl_in_time_and_exposed_communication(as_markdown):
    def times(tp_ms: float) -> list[dict[str, Any]]:
        # The rank that computes longer waits less for the other: its figures count.
        return [recorded(100.0, 80.0, tp=tp_ms + 9.0), recorded(100.0, 85.0, tp=tp_ms)]

    off = made_up("tp", "NCCL", 100.0, times=times(5.0), strategy={"tp_comm_overlap": False})
    rows = [
        made_up("tp", "ring", 98.0, against=off, times=times(2.5)),
        made_up("tp", "pipeline", 101.0, against=off, times=times(2.6)),
        made_up("tp", "unseen", 99.0, against=off, times=[recorded(99.0, 90.0)] * 2),
        made_up("tp", "queues", 99.0, against=off, strategy={"tp_comm_overlap": False}),
        off,
    ]
    for row in rows[:3]:
        row["switches"] = {"tp_comm_overlap": "True (requested)"}
    found = tables(as_markdown({"setting": SETTING, "rows": rows}))
    assert reached(found) == {
        "ring: time of NCCL": ("0.980", "at most 1", "yes"),
        "ring: exposed tp communication of NCCL": ("0.50 (2.50 of 5.00 ms)", "at most 0.5", "yes"),
        "pipeline: time of NCCL": ("1.010", "at most 1", "no"),
        "pipeline: exposed tp communication of NCCL": (
            *("0.52 (2.60 of 5.00 ms)", "at most 0.5", "no"),
        ),
        "unseen: time of NCCL": ("0.990", "at most 1", "yes"),
        "unseen: exposed tp communication of NCCL": (
            *("0.00 (0.00 of 5.00 ms)", "at most 0.5", "yes"),
        ),
    }
    by_case = {row["case"]: row for row in found["tp: made up"]}
    assert by_case["NCCL (baseline)"]["exposed tp ms"] == "5.00"
    assert by_case["NCCL (baseline)"]["exposed"] == "5.0 %"
    assert "expected" not in by_case["ring"]
    peak = peak_flops("NVIDIA H200", "bf16")
    assert peak is not None
    assert by_case["ring"]["MFU"] == f"{100 * 400e12 / peak:.1f} %"


def tuner(recommended: str, ratios: dict[str, float]) -> dict[str, Any]:
    trials = [{"name": name, "ratio": ratio} for name, ratio in ratios.items()]
    report = {"recommended": recommended, "trials": trials}
    by_rank = [{"report": report, "text": "text of the tuner"}]
    return {"item": "tune", "group": "tune", "case": "tune", "status": "measured"} | {
        "by_rank": by_rank
    }


@pytest.mark.parametrize(
    ("ring_ms", "met"),
    # 100.5 is within a percent of the fastest, which is then the baseline.
    [(97.0, "yes"), (100.5, "yes"), (103.0, "no")],
)
@pytest.mark.parametrize(
    ("recommended", "shown"),
    [
        ("tp_comm_overlap", "tp_comm_overlap (0.950 of safe)"),
        # A preset counts as the case that it runs as.
        ("comm=max", "comm=max (0.950 of safe), which runs as tp_comm_overlap"),
    ],
)
def test_the_tuners_choice_is_looked_up_in_the_table(as_markdown, ring_ms, met, recommended, shown):
    safe = made_up("tune", "safe", 100.0, group="in turns")
    rows = [
        safe,
        made_up("tune", "tp_comm_overlap", ring_ms, group="in turns", against=safe),
        made_up("tune", "TransformerEngine's defaults", 102.0, group="in turns", against=safe),
        tuner(recommended, {"safe": 1.0, "sequence_parallel": 0.99, recommended: 0.95}),
    ]
    text = as_markdown({"setting": SETTING, "rows": rows})
    assert "text of the tuner" in text
    fastest = "tp_comm_overlap (0.970" if ring_ms < 100 else "safe (1.000"
    target = f"{fastest} of safe in turns)"
    assert reached(tables(text))["recommended"] == (shown, target, met)


def test_a_choice_that_was_not_measured_in_turns_is_not_judged(as_markdown):
    safe = made_up("tune", "safe", 100.0, group="in turns")
    rows = [safe, tuner("job", {"safe": 1.0, "job": 0.95})]
    assert reached(tables(as_markdown({"setting": SETTING, "rows": rows})))["recommended"] == (
        *("job (0.950 of safe)", "safe (1.000 of safe in turns)", "-"),
    )


def test_layouts_and_scaling_are_compared_with_their_targets(as_markdown):
    auto = {"comm": "auto", "tp": 8}
    name = "70B width, 8 layers, tp8"
    safe = made_up("layouts", "comm=safe", 130.0, group=name, strategy={"comm": "safe", "tp": 8})
    ring = made_up(
        *("layouts", "ring", 99.9),
        group=name,
        against=safe,
        strategy={**auto, "tp_comm_overlap": True},
        times=[recorded(100.0, 80.0, tp=11.0, world=1.0)],
        loss_difference=1e-3,
        loss_peer="comm=safe",
    )
    long = made_up(
        *("layouts", "tp8", 100.0),
        group="32K tokens",
        strategy={"tp": 8},
        times=[recorded(100.0, 90.0, tp=7.9)],
    )
    context = made_up(
        *("layouts", "cp8", 90.0),
        group="32K tokens",
        against=long,
        strategy={"tp": 1, "cp": 8},
        times=[recorded(90.0, 70.0, cp=20.0)],
        loss_difference=2e-3,
        loss_peer="cp8, p2p",
    )
    rows = [safe, ring, long, context]
    rows += [made_up("scaling", f"{n} GPUs", 10.0, ranks=n, group=f"dp{n}") for n in (1, 8)]
    rows[-2]["tokens_per_s"], rows[-1]["tokens_per_s"] = 100.0, 730.0
    found = tables(as_markdown({"setting": SETTING, "rows": rows}))
    assert reached(found) == {
        "ring: speed over comm=safe": ("1.301", "at least 1.3", "yes"),
        "ring: exposed communication": ("12.0 % of the step", "under 12 %", "no"),
        "tp8: exposed communication": ("7.9 % of the step", "under 8 %", "yes"),
        "efficiency on 8 GPUs over 1": ("0.912", "at least 0.92", "no"),
    }
    assert found[f"layouts: {name}"][1]["loss diff."] == "1.0e-03"
    # Not of the baseline, whose weights are others.
    assert found["layouts: 32K tokens"][1]["loss diff."] == "2.0e-03 to cp8, p2p"
    assert [row["efficiency"] for row in found["scaling"]] == ["1.000", "0.912"]


def test_what_has_no_figures_is_said(as_markdown):
    row = {"item": "pp", "group": "pp2", "case": "vpp 4", "status": "not run", "reason": "a | b"}
    found = tables(as_markdown({"setting": SETTING, "rows": [row]}))
    assert found == {
        "Without figures": [{"group": "pp2", "case": "vpp 4", "what": "not run", "why": "a / b"}]
    }
