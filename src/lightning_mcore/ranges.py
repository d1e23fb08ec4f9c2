"""Names the schedule's passes and transfers in a profile, and costs nothing without one.

Enters: what the engine's schedule is about to run. Leaves: profiler ranges, which become NVTX
ranges under ``torch.autograd.profiler.emit_nvtx``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.profiler import record_function


def profiling() -> bool:
    """Whether a profiler records this thread: torch's private but exported flag, some 0.1 us."""
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


class ScheduleRanges:
    """Opens ranges where the engine starts and stops its timers.

    The engine's own ``Timers`` wait for the device; this takes their place in ``config.timers`` for
    the steps that are profiled. Ranges of passes are ``mcore:forward stage=S microbatch=M`` and
    ``mcore:backward ...``, of all else ``mcore:NAME`` with the engine's name.

    Args:
        backward_order: Stage and microbatch of each backward pass, in the schedule's order.
    """

    def __init__(self, backward_order: Sequence[tuple[int, int]]) -> None:
        self._backward = iter(backward_order)
        self._open: dict[str, AbstractContextManager[Any]] = {}

    def forward(self, stage: int, microbatch: int) -> AbstractContextManager[Any]:
        """The range of one forward pass."""
        return record_function(f"mcore:forward stage={stage} microbatch={microbatch}")

    def __call__(self, name: str, log_level: int | None = None) -> _Timer:
        """The timer of a name, as the engine asks for it."""
        return _Timer(self, name)

    def start(self, name: str) -> None:
        """Opens the range of a timer."""
        self._open[name] = self._range(name)
        self._open[name].__enter__()

    def stop(self, name: str) -> None:
        """Closes it."""
        context = self._open.pop(name, None)
        if context is not None:
            context.__exit__(None, None, None)

    def _range(self, name: str) -> AbstractContextManager[Any]:
        if name == "forward-compute":  # named where the microbatch is known
            return nullcontext()
        if name == "backward-compute":
            stage, microbatch = next(self._backward, (-1, -1))
            return record_function(f"mcore:backward stage={stage} microbatch={microbatch}")
        return record_function(f"mcore:{name}")


class _Timer:
    """What ``config.timers(name)`` gives: the two calls that the engine makes on it."""

    def __init__(self, ranges: ScheduleRanges, name: str) -> None:
        self._ranges = ranges
        self._name = name

    def start(self, barrier: bool = False) -> None:
        """Opens the range, without the barrier that the engine asks for."""
        self._ranges.start(self._name)

    def stop(self, barrier: bool = False) -> None:
        """Closes it."""
        self._ranges.stop(self._name)
