"""How long a GPU stood still because the host had not launched its next kernel yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHING = ("cuda_runtime", "cuda_driver")


def host_lateness(events: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Splits the time between the first and the last kernel of a trace; milliseconds.

    Args:
        events: ``traceEvents`` of one rank's Kineto trace.

    Returns:
        ``span_ms``; ``busy_ms``, in which any kernel or copy ran, and ``late_ms``: gaps, as far as
        they lie before the launch of the kernel that ends them. A pipeline's bubble is not among
        them: there a receive was launched long ago and runs, or waits for an event. ``late_share``
        is their share of the span. All zero without a GPU.
    """
    launched: dict[Any, float] = {}
    work = []
    for event in events:
        category = event.get("cat")
        if category in _LAUNCHING:
            correlation = event.get("args", {}).get("correlation")
            launched[correlation] = float(event["ts"]) + float(event.get("dur", 0.0))
        elif category in _ON_DEVICE:
            start = float(event["ts"])
            work.append((start, start + float(event.get("dur", 0.0)), event.get("args", {})))
    work.sort(key=lambda item: item[:2])
    if not work:
        return {"span_ms": 0.0, "busy_ms": 0.0, "late_ms": 0.0, "late_share": 0.0}
    begin = end = work[0][0]
    busy = late = 0.0
    for start, stop, args in work:
        if start > end:
            launch = launched.get(args.get("correlation"))
            if launch is not None:
                late += max(0.0, min(launch, start) - end)
            end = start
        busy += max(0.0, stop - end)
        end = max(end, stop)
    span = end - begin
    return {
        "span_ms": span / 1e3,
        "busy_ms": busy / 1e3,
        "late_ms": late / 1e3,
        "late_share": late / span if span else 0.0,
    }
