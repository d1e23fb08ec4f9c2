"""Where the time of a step goes, from a profiler trace: compute, communication per group, idle.

What enters: Kineto traces (``torch.profiler``). What leaves: intervals per device and stream, and
figures computed from them. Pure: no process group, no Trainer, no engine.
"""

from lightning_mcore.timeline.analysis import (
    GroupTimes,
    StepTimes,
    analyse,
    ideal_bubble_share,
    step_window,
)
from lightning_mcore.timeline.events import Interval, Mark, Timeline
from lightning_mcore.timeline.merged import load_timelines, merged_trace
from lightning_mcore.timeline.names import GroupNames
from lightning_mcore.timeline.reading import read_trace, timeline_of

__all__ = [
    "GroupNames",
    "GroupTimes",
    "Interval",
    "Mark",
    "StepTimes",
    "Timeline",
    "analyse",
    "ideal_bubble_share",
    "load_timelines",
    "merged_trace",
    "read_trace",
    "step_window",
    "timeline_of",
]
