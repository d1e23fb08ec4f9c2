"""Pictures of a step: a bar per rank, and the pipeline over time. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_mcore.errors import ConfigurationError
from lightning_mcore.timeline import intervals as arithmetic
from lightning_mcore.timeline.analysis import StepTimes, step_window
from lightning_mcore.timeline.events import Mark, Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["has_matplotlib", "pipeline_diagram", "save_figure", "stacked_bars"]

# Okabe and Ito's colours, which people with any colour vision tell apart.
_COLOURS = {
    "compute": "#0072b2",
    "forward": "#56b4e9",
    "backward": "#0072b2",
    "idle": "#e8e8e8",
    "tp": "#d55e00",
    "pp": "#e69f00",
    "dp": "#009e73",
    "cp": "#cc79a7",
    "ep": "#f0e442",
    "embedding": "#8c564b",
    "mp": "#7f7f7f",
    "world": "#b0b0b0",
    "other": "#444444",
}


def has_matplotlib() -> bool:
    """Whether pictures can be drawn."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError(
            "Pictures need `matplotlib`, which is not installed; use pip install"
            " 'lightning-mcore[plots]'."
        ) from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: Any) -> None:
    """Writes a figure in the format that the file's name ends in: svg, png or pdf."""
    figure.savefig(path, dpi=110)


def stacked_bars(times: Mapping[str, StepTimes], title: str = "") -> Figure:
    """A bar per rank: compute, exposed communication by group, idle, in ms per step.

    Args:
        times: By the label of the rank, in the order from top to bottom.
        title: Above the picture.
    """
    figure = _figure(8.0, 1.3 + 0.32 * len(times))
    axes = figure.add_subplot()
    groups = sorted(
        {group for rank in times.values() for group in rank.groups},
        key=lambda group: (list(_COLOURS).index(group) if group in _COLOURS else 99, group),
    )
    parts = {"compute": [t.compute_us for t in times.values()]}
    for group in groups:
        parts[group] = [
            t.groups[group].exposed_share_us if group in t.groups else 0.0 for t in times.values()
        ]
    parts["idle"] = [t.idle_us for t in times.values()]
    left = [0.0] * len(times)
    for name, values in parts.items():
        widths = [value / 1e3 for value in values]
        label = name if name in ("compute", "idle") else f"{name}, exposed"
        colour = _COLOURS.get(name, _COLOURS["other"])
        axes.barh(list(times), widths, left=left, color=colour, label=label, height=0.8)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("ms per step")
    axes.spines[["top", "right"]].set_visible(False)
    if title:
        axes.set_title(title, loc="left", fontsize=10)
    figure.legend(loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    return figure


def pipeline_diagram(timelines: Sequence[Timeline], title: str = "") -> Figure:
    """A row per rank over time: forward and backward passes, pipeline transfers, idle.

    Passes carry the number of their microbatch, with one chunk per rank, or ``stage:microbatch``.
    On a GPU they are where their kernels run, on CPU where the host runs them. Transfers (pp) are
    drawn below, thinner; what is left of the row is idle, or other work of the step.

    Args:
        timelines: Of the ranks to draw, aligned.
        title: Above the picture.

    Raises:
        ConfigurationError: If none of them has passes that the schedule marked.
    """
    rows = [(timeline, _passes(timeline)) for timeline in timelines]
    if not any(passes for _, passes in rows):
        raise ConfigurationError(
            "The traces have no ranges `mcore:forward` and `mcore:backward` to draw; record them"
            " from training steps of MCoreStrategy, for example with the TraceExport callback."
        )
    windows = [step_window(timeline) for timeline, passes in rows if passes]
    start, end = min(w[0] for w in windows), max(w[1] for w in windows)
    figure = _figure(11.0, 1.4 + 0.55 * len(rows))
    axes = figure.add_subplot()
    labelled = sum(len(passes) for _, passes in rows) <= 40 * len(rows)
    stages = {mark.stage for _, passes in rows for mark in passes}
    chunked = len(stages) > len(rows) or any(
        len({mark.stage for mark in passes}) > 1 for _, passes in rows
    )
    for row, (timeline, passes) in enumerate(rows):
        axes.broken_barh(
            [(0.0, (end - start) / 1e3)], (row - 0.4, 0.8), facecolors=_COLOURS["idle"]
        )
        for name in ("forward", "backward"):
            spans = [
                ((m.start_us - start) / 1e3, (m.end_us - m.start_us) / 1e3)
                for m in passes
                if m.name == name
            ]
            axes.broken_barh(
                spans,
                (row - 0.4, 0.6),
                facecolors=_COLOURS[name],
                edgecolors="white",
                linewidth=0.5,
            )
        transfers = arithmetic.union(
            (i.start_us, i.end_us) for i in timeline.intervals if i.group == "pp"
        )
        axes.broken_barh(
            [((a - start) / 1e3, (b - a) / 1e3) for a, b in arithmetic.clip(transfers, start, end)],
            (row + 0.22, 0.18),
            facecolors=_COLOURS["pp"],
        )
        for mark in passes if labelled else []:
            middle = ((mark.start_us + mark.end_us) / 2 - start) / 1e3
            text = f"{mark.stage}:{mark.microbatch}" if chunked else f"{mark.microbatch}"
            colour = "white" if mark.name == "backward" else "black"
            axes.text(middle, row - 0.1, text, ha="center", va="center", fontsize=6, color=colour)
    axes.set_yticks(range(len(rows)), [_row_label(timeline, passes) for timeline, passes in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0.0, (end - start) / 1e3)
    axes.set_xlabel("ms")
    axes.spines[["top", "right"]].set_visible(False)
    if title:
        axes.set_title(title, loc="left", fontsize=10)
    _legend(figure)
    return figure


def _legend(figure: Figure) -> None:
    from matplotlib.patches import Patch

    named = {
        "forward": "forward",
        "backward": "backward",
        "pp": "P2P transfer or wait for it",
        "idle": "idle or other work",
    }
    patches = [Patch(facecolor=_COLOURS[key], label=text) for key, text in named.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=4, frameon=False, fontsize=9)


def _passes(timeline: Timeline) -> list[Mark]:
    """Forward and backward passes, by the device's times where they are known."""
    found = [mark for mark in timeline.marks if mark.name in ("forward", "backward")]
    on_device = [mark for mark in found if mark.on_device]
    return on_device or found


def _row_label(timeline: Timeline, passes: Sequence[Mark]) -> str:
    stages = sorted({mark.stage for mark in passes if mark.stage is not None})
    if not stages:
        return f"rank {timeline.rank}"
    held = ", ".join(str(stage) for stage in stages)
    return f"rank {timeline.rank}\nstage {held}"
