"""Turns intervals into the figures of a step.

At each moment of a step a rank computes (some kernel that is not communication runs, on whatever
stream), or it is exposed to communication (only communication runs), or it is idle::

    compute + exposed + idle = step
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_mcore.errors import ConfigurationError
from lightning_mcore.timeline import intervals as arithmetic
from lightning_mcore.timeline.bandwidth import bus_bytes
from lightning_mcore.timeline.events import Interval, Timeline
from lightning_mcore.timeline.intervals import Span

__all__ = ["GroupTimes", "StepTimes", "analyse", "ideal_bubble_share", "step_window"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTimes:
    """Communication of one group in one step, on one rank; all means over the steps analysed."""

    busy_us: float
    """Time in which any of its kernels runs. Kernels that wait for another rank are running."""
    exposed_us: float
    """The part of it that no compute covers, on any stream of the device."""
    exposed_share_us: float
    """The same, with a moment that ``k`` groups are exposed in counted as ``1/k`` of it for each:
    over all groups these add up to ``StepTimes.exposed_us``."""
    operations: float
    bytes: float
    """As nccl-tests count them, of the operations whose size is known."""
    sized_us: float
    """Time of those operations, one after the other."""
    bus_bytes: float

    @property
    def overlap(self) -> float:
        """Share of the communication that compute covers, 0 to 1; 1 if there is none."""
        return 1.0 - self.exposed_us / self.busy_us if self.busy_us else 1.0

    @property
    def algbw_gbps(self) -> float | None:
        """Algorithmic bandwidth in GB/s, where sizes are known."""
        return self.bytes / self.sized_us / 1e3 if self.bytes and self.sized_us else None

    @property
    def busbw_gbps(self) -> float | None:
        """Bus bandwidth in GB/s. A lower bound: a kernel's time holds its wait for other ranks."""
        return self.bus_bytes / self.sized_us / 1e3 if self.bus_bytes and self.sized_us else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """One rank's time in one step, in microseconds; means over the steps analysed."""

    step_us: float
    compute_us: float
    communication_us: float
    """Time in which any communication runs, covered or not."""
    exposed_us: float
    """Time in which communication runs and no compute does."""
    idle_us: float
    """Time in which nothing runs: bubbles, and waits for the host."""
    groups: dict[str, GroupTimes]
    microbatches: int | None = None
    """Per step, where the schedule marked them."""

    @property
    def overlap(self) -> float:
        """Share of all communication that compute covers, 0 to 1; 1 if there is none."""
        if not self.communication_us:
            return 1.0
        return 1.0 - self.exposed_us / self.communication_us

    @property
    def bubble_us(self) -> float:
        """Idle time, and waiting for other stages of a pipeline.

        A receive runs until its sender sends, and stages that end early wait for the rest in the
        gradient norm (``mp``) or the agreement on logs (``world``). It includes the transfers
        themselves, which cannot be told from the waits in one rank's trace.
        """
        waits = [self.groups[name] for name in ("pp", "mp", "world") if name in self.groups]
        return self.idle_us + sum(group.exposed_share_us for group in waits)


def analyse(
    timeline: Timeline, window: Span | None = None, *, steps: int = 1, device: int | None = None
) -> StepTimes:
    """Computes the figures of a timeline.

    Args:
        timeline: Of one rank.
        window: Start and end in microseconds; ``None`` takes ``step_window``.
        steps: Steps in the window, over which figures are averaged.
        device: Whose intervals count; ``None`` takes the one with most of them.

    Raises:
        ConfigurationError: If there is nothing to analyse, or ``steps`` is not positive.
    """
    if steps < 1:
        raise ConfigurationError(f"`steps` ({steps}) must be at least 1; use 1.")
    start, end = step_window(timeline) if window is None else window
    if end <= start:
        raise ConfigurationError(
            f"The window ({start} to {end} us) must end after it starts; use the times of a step."
        )
    device = timeline.device() if device is None else device
    mine = [interval for interval in timeline.intervals if interval.device == device]
    compute = _spans([i for i in mine if i.kind != "communication"], start, end)
    by_group: dict[str, list[Interval]] = {}
    for interval in mine:
        if interval.kind == "communication":
            by_group.setdefault(interval.group or "other", []).append(interval)
    busy = {group: _spans(members, start, end) for group, members in sorted(by_group.items())}
    busy = {group: spans for group, spans in busy.items() if spans}
    exposed = {group: arithmetic.subtract(spans, compute) for group, spans in busy.items()}
    shares = dict(zip(exposed, arithmetic.shared_lengths(list(exposed.values())), strict=True))
    anything = arithmetic.union(span for spans in busy.values() for span in spans)
    all_exposed = arithmetic.subtract(anything, compute)
    groups = {
        group: _group_times(
            [i for i in by_group[group] if i.start_us < end and i.end_us > start],
            busy_us=arithmetic.length(spans),
            exposed_us=arithmetic.length(exposed[group]),
            share_us=shares[group],
            steps=steps,
        )
        for group, spans in busy.items()
    }
    compute_us, exposed_us = arithmetic.length(compute), arithmetic.length(all_exposed)
    return StepTimes(
        step_us=(end - start) / steps,
        compute_us=compute_us / steps,
        communication_us=arithmetic.length(anything) / steps,
        exposed_us=exposed_us / steps,
        idle_us=(end - start - compute_us - exposed_us) / steps,
        groups=groups,
        microbatches=_microbatches(timeline, start, end, steps),
    )


def step_window(timeline: Timeline) -> Span:
    """From the start of the first step to the end of the last one and of its work on the device.

    Without marked steps, from the first interval to the last.

    Raises:
        ConfigurationError: If the trace is empty.
    """
    steps = [mark for mark in timeline.marks if mark.name == "step" and not mark.on_device]
    device = timeline.device()
    ends = [i.end_us for i in timeline.intervals if i.device == device]
    if steps:
        last = max(mark.end_us for mark in steps)
        if device is not None and device >= 0:  # the device runs behind the host
            last = max([last, *ends])
        return min(mark.start_us for mark in steps), last
    if not ends:
        raise ConfigurationError(
            "The trace has no kernels, copies, operators or marked steps to analyse; record it with"
            " torch.profiler activities CPU and CUDA around whole training steps."
        )
    return min(i.start_us for i in timeline.intervals if i.device == device), max(ends)


def ideal_bubble_share(pp: int, vpp: int | None, num_microbatches: int) -> float:
    """Share of a step in which a stage of an ideal (interleaved) 1F1B pipeline is idle.

    The bubble is ``(pp - 1) / (vpp * m)`` of the time of the ``m`` microbatches (Narayanan et al.,
    "Efficient Large-Scale Language Model Training on GPU Clusters", SC'21, section 2.2), all stages
    being equally long and transfers free; of the whole step it is ``(pp - 1) / (vpp * m + pp -
    1)``.
    """
    return (pp - 1) / ((vpp or 1) * num_microbatches + pp - 1)


def _spans(members: Sequence[Interval], start: float, end: float) -> list[Span]:
    return arithmetic.union(arithmetic.clip(((i.start_us, i.end_us) for i in members), start, end))


def _group_times(
    members: Sequence[Interval],
    *,
    busy_us: float,
    exposed_us: float,
    share_us: float,
    steps: int,
) -> GroupTimes:
    size = sized_us = on_bus = 0.0
    for interval in members:
        crossing = bus_bytes(interval.collective, interval.size, interval.group_size)
        if crossing is not None:
            size += interval.size or 0
            on_bus += crossing
            sized_us += interval.end_us - interval.start_us
    return GroupTimes(
        busy_us=busy_us / steps,
        exposed_us=exposed_us / steps,
        exposed_share_us=share_us / steps,
        operations=len(members) / steps,
        bytes=size / steps,
        sized_us=sized_us / steps,
        bus_bytes=on_bus / steps,
    )


def _microbatches(timeline: Timeline, start: float, end: float, steps: int) -> int | None:
    """Forward passes of the chunk that has most, per step."""
    counts: dict[int | None, int] = {}
    for mark in timeline.marks:
        if mark.name == "forward" and not mark.on_device and start <= mark.start_us < end:
            counts[mark.stage] = counts.get(mark.stage, 0) + 1
    return round(max(counts.values()) / steps) if counts else None
