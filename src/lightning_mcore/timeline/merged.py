"""One trace of several ranks, for Perfetto or chrome://tracing, with a row per group."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_mcore.errors import ConfigurationError
from lightning_mcore.timeline.events import MARK, Interval, Mark, Timeline
from lightning_mcore.timeline.names import GroupNames
from lightning_mcore.timeline.reading import read_trace, timeline_of

__all__ = ["aligned", "load_timelines", "merged_trace"]

_KEY = "lightningMcore"
_ORDER = ("schedule", "compute", "copy", "tp", "cp", "ep", "pp", "dp", "embedding", "mp", "world")
_PLACES = 64
"""Rows reserved per kind of row, for events that overlap each other."""


def merged_trace(timelines: Sequence[Timeline], titles: Mapping[int, str]) -> dict[str, Any]:
    """A Chrome trace in which each rank is a process, and each group a thread of it.

    Events of one row that overlap each other get rows of their own, numbered from 2. Ranks are
    aligned by their absolute times, so as well as the clocks of their machines agree.

    Args:
        timelines: Of the ranks.
        titles: What to call each rank, by rank.
    """
    events: list[dict[str, Any]] = []
    for timeline in aligned(timelines):
        rows: dict[str, list[tuple[float, float, str, dict[str, Any]]]] = {}
        for interval in timeline.intervals:
            row = interval.group or "other" if interval.kind == "communication" else interval.kind
            args = {
                "kind": interval.kind,
                "group": interval.group,
                "device": interval.device,
                "stream": interval.stream,
                "collective": interval.collective,
                "bytes": interval.size,
                "ranks": interval.group_size,
            }
            told = {name: value for name, value in args.items() if value is not None}
            rows.setdefault(row, []).append(
                (interval.start_us, interval.end_us, interval.name, told)
            )
        for mark in timeline.marks:
            if mark.name not in ("comm", "wait"):
                rows.setdefault("schedule", []).append(
                    (mark.start_us, mark.end_us, _mark_name(mark), {"on_device": mark.on_device})
                )
        pid = timeline.rank
        events.append(_meta("process_name", pid, 0, titles.get(pid, f"rank {pid}")))
        events.append({**_meta("process_sort_index", pid, 0, ""), "args": {"sort_index": pid}})
        for name in sorted(rows, key=lambda row: (_place(row), row)):
            events += _row(pid, name, rows[name])
    ranks = [{"rank": t.rank, "world_size": t.world_size} for t in timelines]
    return {"displayTimeUnit": "ms", _KEY: {"ranks": ranks}, "traceEvents": events}


def _row(
    pid: int, name: str, spans: list[tuple[float, float, str, dict[str, Any]]]
) -> list[dict[str, Any]]:
    first = _place(name) * _PLACES
    ends: list[list[float]] = []
    events = []
    for start, end, title, args in sorted(spans, key=lambda span: (span[0], -span[1])):
        lane = _lane(ends, start, end)
        if lane == len(ends):
            ends.append([])
            label = name if lane == 0 else f"{name} {lane + 1}"
            events.append(_meta("thread_name", pid, first + lane, label))
            events.append(
                {**_meta("thread_sort_index", pid, first + lane, ""), "args": {"sort_index": first}}
            )
        ends[lane] = [other for other in ends[lane] if other > start] + [end]
        events.append(
            {
                "ph": "X",
                "cat": "mcore",
                "pid": pid,
                "tid": first + lane,
                "name": title,
                "ts": start,
                "dur": end - start,
                "args": args,
            }
        )
    return events


def _lane(ends: list[list[float]], start: float, end: float) -> int:
    """The first lane whose running events, if any, all enclose this one."""
    for lane, running in enumerate(ends):
        if all(other <= start or other >= end for other in running):
            return lane
    return len(ends)


def _place(row: str) -> int:
    return 1 + _ORDER.index(row) if row in _ORDER else len(_ORDER) + 1


def _meta(name: str, pid: int, tid: int, text: str) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": {"name": text}}


def _mark_name(mark: Mark) -> str:
    stage = "" if mark.stage is None else f" stage={mark.stage}"
    microbatch = "" if mark.microbatch is None else f" microbatch={mark.microbatch}"
    return f"{MARK}{mark.name}{stage}{microbatch}"


def load_timelines(paths: Iterable[str | Path], names: GroupNames | None = None) -> list[Timeline]:
    """Timelines of all ranks in files that hold one rank each, or a merged trace, by rank.

    Raises:
        ConfigurationError: If a file is no trace, or two are of the same rank.
    """
    found: list[Timeline] = []
    for path in paths:
        trace = read_trace(path)
        found += _split(trace) if _KEY in trace else [timeline_of(trace, names)]
    ranks = [timeline.rank for timeline in found]
    twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
    if twice:
        raise ConfigurationError(
            f"Ranks {twice} are in more than one of the traces; give each rank's trace once."
        )
    return aligned(sorted(found, key=lambda timeline: timeline.rank))


def aligned(timelines: Sequence[Timeline]) -> list[Timeline]:
    """The same timelines with times from one origin, that of the earliest."""
    origin = min((timeline.origin_ns for timeline in timelines), default=0)
    return [_shifted(timeline, origin) for timeline in timelines]


def _shifted(timeline: Timeline, origin_ns: int) -> Timeline:
    by_us = (timeline.origin_ns - origin_ns) / 1e3
    if not by_us:
        return timeline

    def moved(item: Any) -> Any:
        return dataclasses.replace(item, start_us=item.start_us + by_us, end_us=item.end_us + by_us)

    return dataclasses.replace(
        timeline,
        intervals=tuple(map(moved, timeline.intervals)),
        marks=tuple(map(moved, timeline.marks)),
        origin_ns=origin_ns,
    )


def _split(trace: Mapping[str, Any]) -> list[Timeline]:
    marks: dict[int, list[dict[str, Any]]] = {}
    intervals: dict[int, list[Interval]] = {}
    for event in trace["traceEvents"]:
        if event.get("ph") != "X":
            continue
        start, args = float(event["ts"]), event["args"]
        if "kind" not in args:
            category = "gpu_user_annotation" if args.get("on_device") else "user_annotation"
            marks.setdefault(event["pid"], []).append({**event, "cat": category, "args": {}})
            continue
        intervals.setdefault(event["pid"], []).append(
            Interval(
                device=args["device"],
                stream=args["stream"],
                start_us=start,
                end_us=start + float(event["dur"]),
                kind=args["kind"],
                name=event["name"],
                group=args.get("group"),
                collective=args.get("collective"),
                size=args.get("bytes"),
                group_size=args.get("ranks"),
            )
        )
    return [
        Timeline(
            rank=rank["rank"],
            world_size=rank["world_size"],
            intervals=tuple(
                sorted(intervals.get(rank["rank"], []), key=lambda i: (i.start_us, i.end_us))
            ),
            marks=timeline_of({"traceEvents": marks.get(rank["rank"], [])}).marks,
        )
        for rank in trace[_KEY]["ranks"]
    ]
