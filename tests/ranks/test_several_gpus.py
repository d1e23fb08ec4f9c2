"""The benchmark for several GPUs, on CPU ranks: every case gets a row, and failures end nothing."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks.multigpu.lateness import host_lateness
from benchmarks.multigpu.teams import Team, TeamError

from lightning_mcore.errors import ConfigurationError

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "several_gpus.py"
ITEMS = ("links", "tp", "dp")


@pytest.mark.timeout(120)
def test_runs_end_to_end_on_cpu(tmp_path):
    out, table = tmp_path / "out.json", tmp_path / "out.md"
    command = [
        *(sys.executable, "-W", "ignore", str(SCRIPT)),
        *("--accelerator", "cpu", "--model", "tiny", "--devices", "2", "--items", *ITEMS),
        *("--only", "plain", "ring", "FSDP", "--rounds", "2", "--steps", "2"),
        *("--json", str(out), "--markdown", str(table)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(out.read_text())["rows"]
    found = {(row["group"], row["case"]): row for row in rows}
    assert len(found) == len(rows)
    links = found["links", "links"]["by_rank"][0]["rows"]
    assert {row["operation"] for row in links} >= {"all_reduce", "all_gather", "send_recv"}
    assert all(row["busbw_gbps"] > 0 for row in links)
    skipped = {row["case"] for row in rows if row["status"] == "skipped"}
    assert {"all ring + dgrad (True)", "all ring", "Lightning FSDP"} <= skipped
    assert {row["status"] for row in rows} == {"measured", "skipped"}

    off = found["tp2, micro-batch 2", "off, async NCCL"]
    assert off["is_baseline"]
    assert off["layers"] == "local"
    assert [len(times["groups"]) > 0 for times in off["recorded"]] == [True, True]
    assert "tp" in off["recorded"][0]["groups"]
    assert off["switches"]["sequence_parallel"].startswith("True")

    plain, ddp = found["dp2", "mcore, plain"], found["dp2", "Lightning DDP"]
    assert len(plain["ratios"]) == len(plain["baseline_step_ms"]) == 2
    for ratio, mine, other in zip(
        plain["ratios"], plain["step_ms"], plain["baseline_step_ms"], strict=True
    ):
        assert ratio == pytest.approx(mine / other)
    assert plain["switches"]["overlap_grad_reduce"].startswith("False")
    assert "dp" in plain["recorded"][0]["groups"]
    for row in (off, plain, ddp):
        assert row["tokens_per_s"] > 0
        assert all(math.isfinite(loss) and 0 < loss < 10 for loss in row["losses"])
    # Two ranks with 8 samples of 32 tokens each.
    assert plain["tokens_per_s"] == pytest.approx(2 * 8 * 32 / (plain["median_step_ms"] / 1e3))
    assert "| mcore, plain |" in table.read_text()


def rank() -> int:
    return int(os.environ["RANK"])


def fail_on(which: int) -> int:
    if rank() == which:
        raise ValueError("on purpose")
    time.sleep(60)
    return rank()


def refuse(reasons: list[str]) -> None:
    raise ConfigurationError(reasons[rank()])


def hang() -> None:
    time.sleep(60)


def die() -> None:
    os._exit(3)


def test_a_team_answers_refuses_and_goes_on():
    team = Team("test", 2, "fork", {"MINE": "1"})
    assert team.call(rank, limit_s=10) == [0, 1]
    assert team.call(os.getenv, "MINE", limit_s=10) == ["1", "1"]
    with pytest.raises(TeamError) as refused:
        team.call(refuse, ["no", "no"], limit_s=10)
    assert refused.value.refused
    assert team.call(rank, limit_s=10) == [0, 1]
    # What ranks say differently has not left them in step.
    with pytest.raises(TeamError) as refused:
        team.call(refuse, ["no", "neither"], limit_s=10)
    assert not refused.value.refused
    assert not team.alive


@pytest.mark.parametrize(
    ("call", "errors"),
    [
        ((hang,), {0: "took over 1 s", 1: "took over 1 s"}),
        ((die,), {0: "ended by itself (exit code 3)", 1: "ended by itself (exit code 3)"}),
        ((fail_on, 1), {0: "waited for a rank that failed", 1: "ValueError: on purpose"}),
    ],
)
def test_a_team_that_fails_is_ended(call, errors, monkeypatch):
    monkeypatch.setattr("benchmarks.multigpu.teams._END_S", 0.5)
    team = Team("test", 2, "fork")
    limit_s = 1.0 if call[0] is hang else 10.0
    start = time.monotonic()
    with pytest.raises(TeamError) as failed:
        team.call(*call, limit_s=limit_s)
    assert time.monotonic() - start < 5.0
    assert not failed.value.refused
    assert {r: text.splitlines()[0] for r, text in failed.value.errors.items()} == errors
    assert not team.alive
    team.end()


def launch(correlation: int, ts: float) -> dict:
    return {"cat": "cuda_runtime", "ts": ts, "dur": 0.0, "args": {"correlation": correlation}}


def kernel(correlation: int, ts: float, dur: float) -> dict:
    return {"cat": "kernel", "ts": ts, "dur": dur, "args": {"correlation": correlation}}


def test_lateness_counts_gaps_that_the_host_left():
    # Launched in time, late by 30 of 40 us, and held back by something else than the host.
    events = [
        *(launch(1, 0.0), kernel(1, 10.0, 100.0)),
        *(launch(2, 50.0), kernel(2, 110.0, 90.0)),
        *(launch(3, 230.0), kernel(3, 240.0, 60.0)),
        *(launch(4, 231.0), kernel(4, 500.0, 10.0)),
    ]
    found = host_lateness(events)
    assert found["span_ms"] == pytest.approx(0.5)
    assert found["busy_ms"] == pytest.approx(0.26)
    assert found["late_ms"] == pytest.approx(0.03)
    assert found["late_share"] == pytest.approx(0.06)
    assert host_lateness([launch(1, 0.0)])["late_share"] == 0.0
