"""What follows from a row's figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def median_rank(row: Row) -> Row | None:
    """The recording of the rank whose compute time is the median; of two, of the one that computes
    longer and so waits less for the other.
    """
    recorded = row["recorded"]
    if not recorded:
        return None
    ordered: Sequence[Row] = sorted(recorded, key=lambda times: times["compute_us"])
    return ordered[len(ordered) // 2]


def exposed_ms(row: Row, group: str) -> float | None:
    """Communication of a group that no compute hid, per step; ``None`` without such a group."""
    times = median_rank(row)
    if times is None or group not in times["groups"]:
        return None
    return float(times["groups"][group]["exposed_us"]) / 1e3


def exposed_share(row: Row) -> float | None:
    """Share of the step in which communication of any group ran and nothing else."""
    times = median_rank(row)
    return None if times is None else float(times["exposed_us"] / times["step_us"])


def ideal_bubble(row: Row) -> float:
    """Of a pipeline with equal stages and free transfers, as a share of compute time."""
    return float((row["pp"] - 1) / (row["vpp"] * row["microbatches"]))


def bubble(row: Row) -> float | None:
    """Time of a step that was not recorded beyond the compute of its slowest stage, over that;
    ``None`` without a recording.
    """
    if not row["recorded"] or row["pp"] == 1:
        return None
    slowest = max(times["compute_us"] for times in row["recorded"]) / 1e3
    return float(row["median_step_ms"] / slowest - 1.0)


def bubble_deviation(row: Row) -> float | None:
    """By how much a step is longer than its compute and the ideal bubble, as a share of these."""
    found = bubble(row)
    return None if found is None else (1.0 + found) / (1.0 + ideal_bubble(row)) - 1.0


def expected_ratio(row: Row, baseline: Row) -> float:
    """Ratio of step times, had both schedules their ideal bubbles and the same compute."""
    return (1.0 + ideal_bubble(row)) / (1.0 + ideal_bubble(baseline))


def efficiency(rows: Sequence[Row]) -> dict[int, float]:
    """By number of GPUs, tokens per second and GPU through those on the fewest."""
    each = {len(row["parameters_by_rank"]): row["tokens_per_s"] for row in rows}
    if not each:
        return {}
    least = each[min(each)] / min(each)
    return {count: each[count] / count / least for count in sorted(each)}
