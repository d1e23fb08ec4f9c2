"""Intervals of a GPU's streams: kernels and copies, and what is known of the communication."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning_mcore.timeline.events import Interval
from lightning_mcore.timeline.names import COLLECTIVES, GroupNames, kernel_rule

__all__ = ["device_intervals", "dtype_bytes"]

_BYTES = {
    "byte": 1,
    "char": 1,
    "bool": 1,
    "unsigned char": 1,
    "signed char": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "half": 2,
    "bfloat16": 2,
    "short": 2,
    "short int": 2,
    "float": 4,
    "int": 4,
    "double": 8,
    "long": 8,
    "long int": 8,
}


def dtype_bytes(name: str) -> int | None:
    """Bytes per element of a dtype as the profiler writes it: ``Float``, ``c10::BFloat16``."""
    return _BYTES.get(name.removeprefix("c10::").lower())


def device_intervals(events: Sequence[Mapping[str, Any]], names: GroupNames) -> list[Interval]:
    """All kernels, copies and memsets of a trace."""
    launches = _Launches(events)
    pushing = {
        _stream(event)
        for event in events
        if event.get("cat") == "kernel" and "userbuffers_" in event["name"]
    }
    found = []
    for event in events:
        category = event.get("cat")
        if category == "kernel":
            found.append(_kernel(event, launches, names))
        elif category == "gpu_memset":
            found.append(_interval(event, "copy"))
        elif category == "gpu_memcpy":
            args = event.get("args", {})
            if "PtoP" not in event["name"]:
                found.append(_interval(event, "copy"))
                continue
            # To another GPU by a copy engine; next to userbuffers' kernels it is their transfer.
            of_tp = _stream(event) in pushing
            found.append(
                _interval(
                    event,
                    "communication",
                    group="tp" if of_tp else "other",
                    collective="copy",
                    size=args.get("bytes"),
                )
            )
    return found


def _stream(event: Mapping[str, Any]) -> tuple[int, int]:
    """Device and stream; peer-to-peer copies name their device differently."""
    args = event.get("args", {})
    device = args.get("device", args.get("inDevice", event.get("pid", 0)))
    return int(device), int(args.get("stream", event.get("tid", 0)))


def _interval(event: Mapping[str, Any], kind: Any, **communication: Any) -> Interval:
    device, stream = _stream(event)
    start = float(event["ts"])
    return Interval(
        device=device,
        stream=stream,
        start_us=start,
        end_us=start + float(event.get("dur", 0.0)),
        kind=kind,
        name=event["name"],
        **communication,
    )


def _kernel(event: Mapping[str, Any], launches: _Launches, names: GroupNames) -> Interval:
    args = event.get("args", {})
    if "Collective name" in args:
        return _interval(event, "communication", **_told([args], names))
    rule = kernel_rule(event["name"])
    if rule is None:
        return _interval(event, "compute")
    if rule.group is not None:
        return _interval(event, "communication", group=rule.group, collective=rule.collective)
    calls = launches.calls_behind(args.get("correlation"), rule.collective)
    if calls:
        return _interval(event, "communication", **_told(calls, names))
    group = names.of_call(None, None, rule.collective)
    return _interval(event, "communication", group=group, collective=rule.collective)


def _told(calls: Sequence[Mapping[str, Any]], names: GroupNames) -> dict[str, Any]:
    """What the profiler's record of the collective says; several where calls were batched."""
    first = calls[0]
    collective = COLLECTIVES.get(str(first.get("Collective name")))
    name = first.get("Process Group Name")
    sizes: dict[str, int] = {}
    for call in calls:
        size = _size(call, collective)
        if size is not None:
            way = str(call.get("Collective name"))
            sizes[way] = sizes.get(way, 0) + size
    # Batched sends and receives pass each other, as in nccl-tests' sendrecv.
    return {
        "group": names.of_call(name, first.get("Process Group Description"), collective),
        "collective": collective,
        "size": max(sizes.values()) if sizes else None,
        "group_size": first.get("Group size") or names.size(name),
    }


def _size(call: Mapping[str, Any], collective: str | None) -> int | None:
    each = dtype_bytes(str(call.get("dtype", "")))
    if each is None:
        return None
    sent, received = int(call.get("In msg nelems", 0)), int(call.get("Out msg nelems", 0))
    if collective in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        return max(sent, received) * each
    return (sent or received) * each


class _Launches:
    """Finds the collective calls behind kernels that carry nothing themselves.

    Batched sends and receives are recorded one by one on the host, and launched as one kernel from
    within a range ``nccl:coalesced`` that follows them on the same thread.
    """

    def __init__(self, events: Iterable[Mapping[str, Any]]) -> None:
        self._launch: dict[Any, tuple[Any, float]] = {}
        self._calls: dict[Any, list[Mapping[str, Any]]] = {}
        self._batches: dict[Any, list[tuple[float, float]]] = {}
        self._alone: set[Any] = set()
        for event in events:
            category, thread = event.get("cat"), event.get("tid")
            if category == "kernel":
                args = event.get("args", {})
                if "Collective name" in args:
                    self._alone.add(args.get("External id"))
            elif category in ("cuda_runtime", "cuda_driver"):
                # All kernels of a graph have its launch, which comes long after their calls.
                if "GraphLaunch" not in event["name"]:
                    correlation = event.get("args", {}).get("correlation")
                    self._launch[correlation] = (thread, float(event["ts"]))
            elif event["name"] == "record_param_comms":
                self._calls.setdefault(thread, []).append(event)
            elif event["name"] == "nccl:coalesced" and category == "user_annotation":
                start = float(event["ts"])
                span = (start, start + float(event.get("dur", 0.0)))
                self._batches.setdefault(thread, []).append(span)
        for calls in self._calls.values():
            calls.sort(key=lambda event: float(event["ts"]))
        for spans in self._batches.values():
            spans.sort()

    def calls_behind(self, correlation: Any, collective: str | None) -> list[Mapping[str, Any]]:
        """Arguments of the calls that a kernel does the work of, in order; may be empty.

        Args:
            correlation: Of the kernel with its launch.
            collective: What the kernel's name says; ``None`` accepts any.
        """
        if correlation is None or correlation not in self._launch:
            return []
        thread, at = self._launch[correlation]
        spans = self._batches.get(thread, [])
        index = bisect.bisect_right(spans, (at, float("inf"))) - 1
        start, end = float("-inf"), at
        if index >= 0 and spans[index][0] <= at <= spans[index][1]:
            start, end = (spans[index - 1][1] if index else start), spans[index][0]
        elif index >= 0:
            start = spans[index][1]
        inside = [
            call.get("args", {})
            for call in self._calls.get(thread, [])
            if start <= float(call["ts"]) <= end
        ]
        return [
            args
            for args in inside
            if args.get("Collective name") in COLLECTIVES
            and collective in (None, COLLECTIVES[args["Collective name"]])
            and args.get("External id") not in self._alone
        ]
