"""Room for Python's frames under a deep call stack.

CPython keeps frames in chunks of 16 KiB (pystate.c, push_chunk). A call for which the current chunk
has no room maps a new one, and the return unmaps it. Where a loop makes such calls, below whatever
a Trainer and its hooks have on the stack, each of them costs two system calls and page faults, and
disturbs the other threads of the process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

__all__ = ["with_room_for_frames"]

P = ParamSpec("P")
R = TypeVar("R")

_WORDS = 1 << 15
"""Stack that the outer frame claims, 256 KiB. Its chunk is the next power of two, so that about as
much is left for the frames of a thousand nested calls; untouched pages cost no memory."""


def with_room_for_frames(function: Callable[P, R]) -> Callable[P, R]:
    """Runs ``function`` in a chunk of its own, in which what it calls has room too."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs)

    wrapper = cast(Any, call)
    wrapper.__code__ = wrapper.__code__.replace(co_stacksize=_WORDS)
    return call
