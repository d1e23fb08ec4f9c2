"""Draws traces as a pipeline diagram: the work of ``lightning-mcore timeline``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from lightning_mcore.errors import ConfigurationError
from lightning_mcore.timeline.analysis import analyse, ideal_bubble_share, step_window
from lightning_mcore.timeline.events import Timeline
from lightning_mcore.timeline.merged import load_timelines
from lightning_mcore.timeline.pictures import pipeline_diagram, save_figure

__all__ = ["draw_traces"]


def draw_traces(
    traces: Sequence[str | Path],
    out: str | Path,
    *,
    steps: int = 1,
    ranks: Sequence[int] | None = None,
) -> str:
    """Draws stages over time, from traces of several ranks.

    Args:
        traces: Files, of one rank each or merged.
        out: Picture to write; svg, png or pdf by its name.
        steps: Steps to draw, from the first one in the traces.
        ranks: Ranks to draw; ``None`` takes the first of those that hold the same stages.

    Returns:
        What was drawn, and the shares of each row.

    Raises:
        ConfigurationError: If a file is no trace, has no passes of a schedule, or lacks a rank.
    """
    out = Path(out)
    if out.suffix not in (".svg", ".png", ".pdf"):
        raise ConfigurationError(
            f"`{out}` must end in .svg, .png or .pdf; use {out.with_suffix('.svg')}."
        )
    if steps < 1:
        raise ConfigurationError(f"`steps` ({steps}) must be at least 1; use 1.")
    found = load_timelines(traces)
    chosen = [_first_steps(line, steps) for line in _choose(found, ranks)]
    figure = pipeline_diagram(chosen)
    save_figure(figure, out)
    return "\n".join([*_describe(chosen), f"Wrote {out}."])


def _choose(found: Sequence[Timeline], ranks: Sequence[int] | None) -> list[Timeline]:
    if ranks is not None:
        by_rank = {timeline.rank: timeline for timeline in found}
        missing = [rank for rank in ranks if rank not in by_rank]
        if missing:
            raise ConfigurationError(
                f"`ranks` {missing} are not in the traces, which have {sorted(by_rank)}; choose"
                " among these."
            )
        return [by_rank[rank] for rank in ranks]
    by_stages: dict[tuple[int, ...], Timeline] = {}
    for timeline in found:
        by_stages.setdefault(_stages(timeline), timeline)
    return [by_stages[stages] for stages in sorted(by_stages)]


def _stages(timeline: Timeline) -> tuple[int, ...]:
    return tuple(sorted({m.stage for m in timeline.marks if m.stage is not None}))


def _first_steps(timeline: Timeline, steps: int) -> Timeline:
    """The timeline cut after its first steps."""
    marked = [mark for mark in timeline.marks if mark.name == "step" and not mark.on_device]
    if len(marked) <= steps:
        return timeline
    # On a GPU the device is still at work on them when the host has begun the next.
    end = marked[steps].start_us
    device = [m for m in timeline.marks if m.on_device and m.name == "step"]
    if len(device) > steps:
        end = device[steps].start_us
    return dataclasses.replace(
        timeline,
        intervals=tuple(i for i in timeline.intervals if i.start_us < end),
        marks=tuple(m for m in timeline.marks if m.start_us < end),
    )


def _describe(timelines: Sequence[Timeline]) -> list[str]:
    lines = []
    for timeline in timelines:
        steps = sum(mark.name == "step" and not mark.on_device for mark in timeline.marks) or 1
        times = analyse(timeline, step_window(timeline), steps=steps)
        share = {
            "compute": times.compute_us,
            "exposed communication": times.exposed_us,
            "idle": times.idle_us,
        }
        parts = ", ".join(f"{name} {100 * v / times.step_us:.1f} %" for name, v in share.items())
        lines.append(f"rank {timeline.rank}: {times.step_us / 1e3:.2f} ms per step: {parts}")
    stages = {stage for timeline in timelines for stage in _stages(timeline)}
    microbatches = analyse(timelines[0]).microbatches if timelines else None
    pp = len(timelines)
    if microbatches and pp > 1 and len(stages) % pp == 0:
        steps = sum(m.name == "step" and not m.on_device for m in timelines[0].marks) or 1
        per_step = max(1, microbatches // steps)
        ideal = ideal_bubble_share(pp, len(stages) // pp, per_step)
        lines.append(
            f"{pp} ranks with {len(stages)} stages and {per_step} microbatches: an ideal pipeline"
            f" is idle for {100 * ideal:.1f} % of the step"
        )
    return lines
