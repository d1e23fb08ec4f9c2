"""That calls under a deep stack do not map and unmap memory each time."""

from __future__ import annotations

import resource
from typing import Any

import pytest

from lightning_mcore.frames import with_room_for_frames
from lightning_mcore.optimizer import EngineOptimizer
from lightning_mcore.schedule import StepRunner

CALLS, DEPTHS = 300, range(60, 260, 4)


def leaf(depth: int) -> int:
    """Some frames more."""
    return depth if depth == 0 else leaf(depth - 1)


def loop() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(CALLS):
        leaf(4)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def at_depth(depth: int, function: Any) -> int:
    return function() if depth == 0 else at_depth(depth - 1, function)


def test_no_depth_makes_calls_slow():
    without = max(at_depth(depth, loop) for depth in DEPTHS)
    with_room = max(at_depth(depth, with_room_for_frames(loop)) for depth in DEPTHS)
    if without < CALLS:
        pytest.skip(f"this interpreter keeps its chunks: {without} faults in {CALLS} calls")
    assert with_room < CALLS / 10


@pytest.mark.parametrize("call", [StepRunner._run, EngineOptimizer.step])
def test_schedule_and_optimizer_have_room(call):
    assert call.__code__.co_stacksize * 8 >= 2**18


def test_it_stays_the_same_function():
    @with_room_for_frames
    def divide(above: int, /, below: int = 1, *, sign: int = 1) -> float:
        """Divides."""
        return sign * above / below

    assert divide(6, below=3, sign=-1) == -2.0
    assert (divide.__name__, divide.__doc__) == ("divide", "Divides.")
    with pytest.raises(ZeroDivisionError):
        divide(1, 0)
