"""What a trace says once its events are sorted into kinds and groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["MARK", "Interval", "Kind", "Mark", "Timeline"]

Kind: TypeAlias = Literal["compute", "communication", "copy"]
"""``copy``: to, from and within one device's memory, and its filling. It is the device's own work,
and counts as compute wherever only communication and everything else are told apart."""

MARK = "mcore:"
"""How the names of profiler ranges begin that this package opens."""


@dataclass(frozen=True, slots=True)
class Interval:
    """One kernel, copy or collective."""

    device: int
    """CUDA device; -1 for the host, where ranks run on CPU."""
    stream: int
    """CUDA stream, or the thread on CPU."""
    start_us: float
    end_us: float
    kind: Kind
    name: str
    group: str | None = None
    """Of communication: ``tp``, ``pp``, ``dp``, ``cp``, ``ep``, ``embedding``, ``mp`` (the gradient
    norm), ``world``, or ``other`` where nothing tells."""
    collective: str | None = None
    """Of communication, as in ``bandwidth.BUS_FACTORS``; ``None`` where nothing tells."""
    size: int | None = None
    """Of communication: bytes as nccl-tests count them; ``None`` where nothing tells."""
    group_size: int | None = None
    """Ranks that take part; ``None`` where nothing tells."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A range that the program named: a step, or the forward pass of a microbatch."""

    name: str
    """Without the prefix: ``step``, ``forward``, ``backward``, or the engine's name of a timer."""
    start_us: float
    end_us: float
    stage: int | None = None
    microbatch: int | None = None
    on_device: bool = False
    """Whether the times are those of the kernels launched in the range, not of the host."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """One rank's trace."""

    rank: int
    world_size: int
    intervals: tuple[Interval, ...]
    marks: tuple[Mark, ...]
    origin_ns: int = 0
    """Absolute time of 0 us, since the epoch; aligns ranks whose clocks agree."""

    def device(self) -> int | None:
        """The device with most intervals, that of this rank; ``None`` if there are none."""
        counts: dict[int, int] = {}
        for interval in self.intervals:
            counts[interval.device] = counts.get(interval.device, 0) + 1
        return max(counts, key=lambda device: counts[device]) if counts else None
