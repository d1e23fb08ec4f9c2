"""Intervals of a rank that runs on CPU over gloo: what its thread does, and gloo's threads.

torch (2.11 and 2.13) records a ``c10d::`` operator where a collective is issued, and a range
``gloo:all_reduce`` from its start to its end: on one of gloo's threads, or for a send and a receive
on the issuing thread, from the call to the end of its wait. Neither names the process group. The
ranges ``mcore:comm NAME`` around the calls do, and ``mcore:wait`` around waits, where the trace was
recorded with ``_mcore.cpu.collective_ranges``.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_mcore.timeline import intervals as arithmetic
from lightning_mcore.timeline.events import MARK, Interval
from lightning_mcore.timeline.intervals import Span
from lightning_mcore.timeline.names import COLLECTIVES, GroupNames
from lightning_mcore.timeline.on_device import dtype_bytes

__all__ = ["host_intervals"]

_HOST = -1
_GLOO = "gloo:"
_C10D = "c10d::"
_ALSO = {"reduce_scatter": "all_reduce"}
"""Titles under which gloo does the work of another collective (ProcessGroupGloo.cpp)."""


def host_intervals(events: Sequence[Mapping[str, Any]], names: GroupNames) -> list[Interval]:
    """Compute and communication of a rank without a device.

    With ranges around calls and waits, the rank's thread computes whenever it is in neither, Python
    included.
    In traces without them it computes while it runs operators.
    """
    return [*_compute(events), *_communication(events, names)]


def _span(event: Mapping[str, Any]) -> Span:
    start = float(event["ts"])
    return start, start + float(event.get("dur", 0.0))


def _compute(events: Sequence[Mapping[str, Any]]) -> list[Interval]:
    steps = [event for event in events if event["name"] == f"{MARK}step"]
    # Some of gloo's calls return only when they are done, so a call is no compute either.
    waits = arithmetic.union(
        _span(e)
        for e in events
        if e["name"] == f"{MARK}wait" or e["name"].startswith(f"{MARK}comm ")
    )
    if steps and waits:
        thread = steps[0]["tid"]
        return [
            Interval(_HOST, int(thread), start, end, "compute", "host")
            for start, end in arithmetic.subtract(arithmetic.union(map(_span, steps)), waits)
        ]
    by_thread: dict[Any, list[Span]] = {}
    for event in events:
        own = event.get("cat") == "cpu_op" and not event["name"].startswith(_C10D)
        if own and event["name"] != "record_param_comms":
            by_thread.setdefault(event["tid"], []).append(_span(event))
    return [
        Interval(_HOST, int(thread), start, end, "compute", "operators")
        for thread, spans in by_thread.items()
        for start, end in arithmetic.union(spans)
    ]


def _communication(events: Sequence[Mapping[str, Any]], names: GroupNames) -> list[Interval]:
    calls = _Calls(events)
    found = []
    gloo = [event for event in events if event["name"].startswith(_GLOO)]
    for event in sorted(gloo, key=lambda event: float(event["ts"])):
        call = calls.take(event)
        pg = calls.group_name(call)
        group_size = names.size(pg)
        if group_size == 1:
            continue
        operation = call["name"].removeprefix(_C10D) if call is not None else ""
        collective = COLLECTIVES.get(operation)
        start, end = _span(event)
        found.append(
            Interval(
                _HOST,
                int(event["tid"]),
                start,
                end,
                "communication",
                event["name"],
                group=names.of_call(pg, None, collective),
                collective=collective,
                size=_size(event, collective, group_size),
                group_size=group_size,
            )
        )
    return found


def _size(event: Mapping[str, Any], collective: str | None, group_size: int | None) -> int | None:
    args = event.get("args", {})
    dims, types = args.get("Input Dims"), args.get("Input type")
    each = dtype_bytes(types[0]) if types else None
    if not dims or each is None:
        return None
    size = _elements(dims) * each
    if collective == "all_gather":
        return size * group_size if group_size is not None else None
    return size


def _elements(dims: Any) -> int:
    """Elements of one tensor's dims, or of a list of them."""
    if dims and isinstance(dims[0], list):
        return sum(_elements(inner) for inner in dims)
    return math.prod(dims) if dims else 0


class _Calls:
    """The ``c10d::`` operators of a trace, each to be found once for the gloo range it began."""

    def __init__(self, events: Sequence[Mapping[str, Any]]) -> None:
        self._open: dict[str, list[Mapping[str, Any]]] = {}
        ranges: dict[Any, list[tuple[float, float, str]]] = {}
        prefix = f"{MARK}comm "
        for event in events:
            if event["name"].startswith(_C10D):
                self._open.setdefault(_title(event["name"]), []).append(event)
            elif event["name"].startswith(prefix):
                start, end = _span(event)
                known = ranges.setdefault(event["tid"], [])
                known.append((start, end, event["name"].removeprefix(prefix)))
        for calls in self._open.values():
            calls.sort(key=lambda event: float(event["ts"]))
        self._ranges = {thread: sorted(spans) for thread, spans in ranges.items()}

    def take(self, event: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The call behind a gloo range: the oldest that fits by kind, time and elements."""
        title = event["name"].removeprefix(_GLOO)
        start = float(event["ts"])
        elements = _elements(event.get("args", {}).get("Input Dims") or [])
        titles = [title, *(t for t, also in _ALSO.items() if also == title)]
        fitting = [
            (float(call["ts"]), title, index)
            for title in titles
            for index, call in enumerate(self._open.get(title, []))
            if float(call["ts"]) <= start
        ]
        if not fitting:
            return None

        def order(candidate: tuple[float, str, int]) -> tuple[bool, float]:
            at, name, index = candidate
            dims = self._open[name][index].get("args", {}).get("Input Dims") or []
            same = any(_elements(d) == elements for d in dims if isinstance(d, list))
            return not same, at

        _, title, index = min(fitting, key=order)
        return self._open[title].pop(index)

    def group_name(self, call: Mapping[str, Any] | None) -> str | None:
        """What torch calls the process group of a call, where a range tells."""
        if call is None:
            return None
        spans = self._ranges.get(call["tid"], [])
        at = float(call["ts"])
        index = bisect.bisect_right(spans, (at, math.inf, "")) - 1
        if index >= 0 and spans[index][0] <= at <= spans[index][1]:
            return spans[index][2]
        return None


def _title(name: str) -> str:
    """What gloo calls the work of an operator."""
    operation = name.removeprefix(_C10D)
    if operation.startswith(("send", "recv")):
        return operation[:4]
    return COLLECTIVES.get(operation, operation)
