"""One set of figures for all ranks: scalars to log, and the line that says what to change.

Ranks wait for each other, so their steps are equally long, and the slowest rank is the one that
computes most: the others spend the difference waiting in communication.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_mcore.timeline.analysis import GroupTimes, StepTimes

__all__ = ["Summary", "advice", "scalars", "summarise"]

_NO_TIME = GroupTimes(
    busy_us=0.0,
    exposed_us=0.0,
    exposed_share_us=0.0,
    operations=0.0,
    bytes=0.0,
    sized_us=0.0,
    bus_bytes=0.0,
)


@dataclass(frozen=True, slots=True)
class Summary:
    """Ranks that stand for all of them, by the time they compute."""

    slowest: int
    median: int
    fastest: int


def summarise(times: Sequence[StepTimes]) -> Summary:
    """The ranks that compute longest, shortest and in between (the lower median).

    Args:
        times: Of each rank, by rank; at least one.
    """
    order = sorted(range(len(times)), key=lambda rank: times[rank].compute_us)
    return Summary(slowest=order[-1], median=order[(len(order) - 1) // 2], fastest=order[0])


def scalars(times: Sequence[StepTimes], ideal_bubble: float | None = None) -> dict[str, float]:
    """Values to log, the same on every rank that was given the same times.

    Plain names are the median rank's; ``NAME/slowest_rank`` and ``NAME/fastest_rank`` those of the
    ranks that compute longest and shortest. Times in ms, bandwidth in GB/s, shares and overlap 0 to
    1. A group that a rank has no communication in counts as 0 there; without known sizes it has no
    bandwidth.

    Args:
        times: Of each rank, by rank; at least one.
        ideal_bubble: What ``ideal_bubble_share`` gives for the schedule that ran; ``None`` leaves
            the pipeline's values out.
    """
    chosen = summarise(times)
    groups = sorted({group for rank in times for group in rank.groups})
    values: dict[str, float] = {}
    for suffix, rank in (
        ("", chosen.median),
        ("/slowest_rank", chosen.slowest),
        ("/fastest_rank", chosen.fastest),
    ):
        for name, value in _of_rank(times[rank], groups, pipelined=ideal_bubble is not None):
            values[f"{name}{suffix}"] = value
    if ideal_bubble is not None:
        values["pipeline/ideal_bubble_share"] = ideal_bubble
    return values


def _of_rank(
    times: StepTimes, groups: Sequence[str], *, pipelined: bool
) -> list[tuple[str, float]]:
    values = [
        ("step/ms", times.step_us / 1e3),
        ("compute/ms", times.compute_us / 1e3),
        ("idle/ms", times.idle_us / 1e3),
        ("comm/exposed_ms", times.exposed_us / 1e3),
        ("comm/share", times.exposed_us / times.step_us),
        ("comm/overlap", times.overlap),
    ]
    if pipelined:
        values.append(("pipeline/bubble_share", times.bubble_us / times.step_us))
    for group in groups:
        part = times.groups.get(group, _NO_TIME)
        values += [
            (f"comm/{group}/exposed_ms", part.exposed_us / 1e3),
            (f"comm/{group}/share", part.exposed_us / times.step_us),
            (f"comm/{group}/total_ms", part.busy_us / 1e3),
            (f"comm/{group}/overlap", part.overlap),
        ]
        if part.bytes:
            values.append((f"comm/{group}/mbytes", part.bytes / 1e6))
        if part.busbw_gbps is not None:
            values.append((f"comm/{group}/busbw_gbps", part.busbw_gbps))
        if part.algbw_gbps is not None:
            values.append((f"comm/{group}/algbw_gbps", part.algbw_gbps))
    return values


_SWITCHES: dict[str, tuple[str, ...]] = {
    "tp": ("sequence_parallel", "tp_comm_overlap"),
    "pp": ("overlap_p2p",),
    "dp": ("overlap_grad_reduce", "overlap_param_gather"),
}
_OTHERWISE: dict[str, str] = {
    "tp": "larger micro-batches, or a smaller tp",
    "pp": "more microbatches per step, or a larger vpp",
    "dp": "another bucket_size, or more microbatches per step",
    "cp": "another cp_comm_type, or a smaller cp",
    "ep": "overlap_moe='1f1b', another moe_dispatcher, or a smaller ep",
    "embedding": "untied embeddings, if the model allows",
    "mp": "nothing: the gradient norm is waited for here, with the ranks that come late",
    "world": "fewer values in self.log; ranks that come late are waited for here too",
    "idle": "larger micro-batches or CUDA graphs, since the device waits for the host",
}


def advice(times: Sequence[StepTimes], switches: Mapping[str, Any]) -> str:
    """One line: how the median rank spends its step, what costs most, and what would address it.

    Args:
        times: Of each rank, by rank; at least one.
        switches: Effective values by name of the switches that could be on; others are not advised.
    """
    chosen = summarise(times)
    median = times[chosen.median]
    step = median.step_us
    parts = {name: group.exposed_share_us for name, group in median.groups.items()}
    listed = ", ".join(
        f"{name} {100 * value / step:.0f} %"
        for name, value in sorted(parts.items(), key=lambda item: -item[1])
        if value >= 0.005 * step
    )
    text = (
        f"{step / 1e3:.1f} ms per step = compute {100 * median.compute_us / step:.0f} % + exposed"
        f" communication {100 * median.exposed_us / step:.0f} %{f' ({listed})' if listed else ''}"
        f" + idle {100 * median.idle_us / step:.0f} % (rank {chosen.median}, the median)"
    )
    worst = max([*parts.items(), ("idle", median.idle_us)], key=lambda item: item[1])
    if worst[1] < 0.02 * step:
        return f"{text}; nothing but compute costs more than 2 %."
    name, value = worst
    off = [s for s in _SWITCHES.get(name, ()) if s in switches and not switches[s]]
    try_this = f"{off[0]}=True, now off" if off else _OTHERWISE.get(name, "a look at the trace")
    what = "idle time" if name == "idle" else f"{name} communication"
    return f"{text}; {what} costs most, {value / 1e3:.1f} ms: try {try_this}."
