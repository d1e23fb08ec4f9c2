"""Where the time of a step goes: kernels by total time, gaps between them, and the host."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from backends import Live, now

from lightning_mcore.timeline.intervals import length, union
from lightning_mcore.timeline.reading import read_trace

_ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_IN_DRIVER = {"cuda_runtime", "cuda_driver"}


def profile_steps(live: Live, steps: int, device: torch.device, trace: Path | None) -> Any:
    """Profiles ``steps`` steps of a warm backend.

    Collective over the world where steps are.

    Args:
        live: The backend.
        steps: Of the profile, and of the undisturbed run before it.
        device: Of this rank.
        trace: Where to keep the trace.

    Returns:
        Milliseconds per step: undisturbed (wall, host until its last call returned, processor), and
        under the profiler (wall, kernels, waits of the host); and kernels by total time. ``idle``
        is the undisturbed step minus the time in which any kernel ran.
    """
    start, busy_start = now(device), time.process_time()
    live.run(steps)
    host, processor = time.perf_counter() - start, time.process_time() - busy_start
    wall = now(device) - start
    on_gpu = device.type != "cpu"
    kinds = [torch.profiler.ProfilerActivity.CUDA] if on_gpu else []
    if not on_gpu or trace is not None:
        # Operators of the host, which cost time and fill most of a trace.
        kinds.append(torch.profiler.ProfilerActivity.CPU)
    with torch.profiler.profile(activities=kinds):
        # The profiler starts up in the main thread, which is not the one of a Trainer here.
        torch.zeros(1, device=device).add_(1.0)
    profiler = torch.profiler.profile(activities=kinds)
    profiled = [0.0]

    @contextmanager
    def around() -> Iterator[None]:
        with profiler:
            begin = now(device)
            yield
            profiled[0] = now(device) - begin

    live.run(steps, around=around)
    result: dict[str, Any] = {
        "steps": steps,
        "step_ms": 1e3 * wall / steps,
        "host_ms": 1e3 * host / steps,
        "processor_ms": 1e3 * processor / steps,
        "profiled_step_ms": 1e3 * profiled[0] / steps,
    }
    if not on_gpu:
        ops = sorted(profiler.key_averages(), key=lambda op: -op.self_cpu_time_total)
        result["kernels"] = [_row(op.key, op.self_cpu_time_total, op.count, steps) for op in ops]
        return result
    with TemporaryDirectory() as folder:
        path = trace or Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return result | _from_trace(read_trace(path)["traceEvents"], steps, result["step_ms"])


def _from_trace(events: list[dict[str, Any]], steps: int, step_ms: float) -> dict[str, Any]:
    kernels: dict[str, list[float]] = defaultdict(list)
    spans = []
    waits = launches = 0.0
    for event in events:
        kind, name = event.get("cat"), event.get("name", "")
        if kind in _ON_DEVICE:
            kernels[name].append(event["dur"])
            spans.append((event["ts"], event["ts"] + event["dur"]))
        elif kind in _IN_DRIVER:
            waits += event["dur"] if "Synchronize" in name else 0.0
            launches += "Launch" in name
    busy_ms = length(union(spans)) / 1e3 / steps
    rows = [_row(name, sum(times), len(times), steps) for name, times in kernels.items()]
    return {
        "busy_ms": busy_ms,
        "idle_ms": step_ms - busy_ms,
        "host_waits_ms": waits / 1e3 / steps,
        "launches": launches / steps,
        "kernels": sorted(rows, key=lambda row: -row["ms"]),
    }


def _row(name: str, total_us: float, count: int, steps: int) -> dict[str, Any]:
    return {"name": name, "ms": total_us / 1e3 / steps, "calls": count / steps}


def profile_table(name: str, result: dict[str, Any], top: int) -> list[str]:
    """Markdown of a profile."""
    figures = {key: value for key, value in result.items() if key not in ("kernels", "steps")}
    lines = [
        f"### {name}, per step over {result['steps']} steps",
        "",
        ", ".join(
            f"{key.removesuffix('_ms').replace('_', ' ')} {value:.2f}{' ms' * key.endswith('_ms')}"
            for key, value in figures.items()
        ),
        "",
        "| ms | % of step | calls | kernel |",
        "|---:|---:|---:|---|",
    ]
    for row in result["kernels"][:top]:
        share = 100 * row["ms"] / result["step_ms"]
        text = row["name"].replace("|", "\\|")[:110]
        lines.append(f"| {row['ms']:.3f} | {share:.1f} | {row['calls']:.1f} | `{text}` |")
    return lines
