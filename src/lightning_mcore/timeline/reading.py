"""Reads Kineto traces into timelines: GPU kernels with what launched them, or gloo on the host.

A trace is the JSON that ``torch.profiler.profile.export_chrome_trace`` writes, or the same as a
dict. Which events it has was read from traces of torch 2.11 and 2.13.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_mcore.errors import ConfigurationError
from lightning_mcore.timeline.events import MARK, Mark, Timeline
from lightning_mcore.timeline.names import GroupNames
from lightning_mcore.timeline.on_device import device_intervals
from lightning_mcore.timeline.on_host import host_intervals

__all__ = ["read_trace", "timeline_of"]

_MARK = re.compile(rf"{MARK}(\S+)(?: stage=(\d+))?(?: microbatch=(\d+))?")
_OF_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


def read_trace(path: str | Path) -> dict[str, Any]:
    """Loads the JSON of a trace, packed with gzip or not.

    Raises:
        ConfigurationError: If the file is not a trace.
    """
    path = Path(path)
    try:
        packed = path.read_bytes()
        loaded = json.loads(gzip.decompress(packed) if packed[:2] == b"\x1f\x8b" else packed)
    except FileNotFoundError:
        raise ConfigurationError(
            f"`{path}` is not there; give the file that torch.profiler's export_chrome_trace or the"
            " TraceExport callback wrote."
        ) from None
    except (OSError, EOFError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigurationError(
            f"`{path}` cannot be read as a profiler trace ({error}); give the JSON (or .json.gz)"
            " that torch.profiler's export_chrome_trace or the TraceExport callback wrote."
        ) from error
    if not isinstance(loaded, dict) or not isinstance(loaded.get("traceEvents"), list):
        raise ConfigurationError(
            f"`{path}` has no list `traceEvents`, so it is not a profiler trace; give what"
            " torch.profiler's export_chrome_trace or the TraceExport callback wrote."
        )
    return loaded


def timeline_of(trace: Mapping[str, Any], names: GroupNames | None = None) -> Timeline:
    """Sorts the events of one rank's trace into kinds and groups.

    Args:
        trace: As ``read_trace`` gives it.
        names: Names of process groups, beyond what the trace tells by itself.
    """
    distributed = trace.get("distributedInfo") or {}
    names = (names or GroupNames()).with_trace(distributed)
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    marks = _marks(events)
    if any(event.get("cat") in _OF_DEVICE for event in events):
        intervals = device_intervals(events, names)
    else:
        intervals = host_intervals(events, names)
    return Timeline(
        rank=int(distributed.get("rank", 0)),
        world_size=int(distributed.get("world_size", 1)),
        intervals=tuple(sorted(intervals, key=lambda i: (i.start_us, i.end_us))),
        marks=tuple(sorted(marks, key=lambda mark: (mark.start_us, -mark.end_us))),
        origin_ns=int(trace.get("baseTimeNanoseconds", 0)),
    )


def _marks(events: list[dict[str, Any]]) -> list[Mark]:
    found: list[Mark] = []
    on_device: dict[Any, Mark] = {}
    for event in events:
        match = _MARK.fullmatch(event["name"]) if event["name"].startswith(MARK) else None
        if match is None or event.get("cat") not in ("user_annotation", "gpu_user_annotation"):
            continue
        name, stage, microbatch = match.groups()
        start = float(event["ts"])
        mark = Mark(
            name=name,
            start_us=start,
            end_us=start + float(event.get("dur", 0.0)),
            stage=None if stage is None else int(stage),
            microbatch=None if microbatch is None else int(microbatch),
            on_device=event["cat"] == "gpu_user_annotation",
        )
        if not mark.on_device:
            found.append(mark)
            continue
        # One per stream that the range launched work on: together they are its time.
        key = event.get("args", {}).get("External id", (event["name"], start))
        known = on_device.get(key, mark)
        on_device[key] = Mark(
            name=name,
            start_us=min(known.start_us, mark.start_us),
            end_us=max(known.end_us, mark.end_us),
            stage=mark.stage,
            microbatch=mark.microbatch,
            on_device=True,
        )
    return [*found, *on_device.values()]
