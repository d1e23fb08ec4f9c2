"""Names what the engine sends for each bucket of gradients and parameters, for a profile.

Nothing here is collective; each rank decides for itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

RangeOf = Callable[[str], AbstractContextManager[Any]]

_SENDS = {"start_grad_sync": "grad-reduce", "start_param_sync": "param-gather"}
"""Methods of a bucket group (distributed/param_and_grad_buffer.py) that start its collectives. The
engine calls them through the object, from hooks, schedules and each other."""


@contextmanager
def bucket_ranges(chunks: Sequence[Any], range_of: RangeOf) -> Iterator[None]:
    """Opens a range around each start of a bucket's collectives.

    The methods are covered by attributes of the same name, which are taken away at the end.

    Args:
        chunks: Wrapped in the engine's DDP.
        range_of: Opens the range of a name such as ``mcore:grad-reduce chunk=0 bucket=3
            elements=40.0M``; buckets are numbered in the engine's order, in which gradients become
            ready, and those of experts separately (``expert-bucket=0``).
    """
    covered: list[tuple[Any, str]] = []
    try:
        for index, chunk in enumerate(chunks):
            for kind, groups in (
                ("bucket", chunk.bucket_groups),
                ("expert-bucket", chunk.expert_parallel_bucket_groups),
            ):
                for number, group in enumerate(groups):
                    size = _short(sum(bucket.grad_data.numel() for bucket in group.buckets))
                    for method, send in _SENDS.items():
                        name = f"mcore:{send} chunk={index} {kind}={number} elements={size}"
                        setattr(group, method, _covered(getattr(group, method), name, range_of))
                        covered.append((group, method))
        yield
    finally:
        for group, method in covered:
            delattr(group, method)


def _covered(call: Callable[..., Any], name: str, range_of: RangeOf) -> Callable[..., Any]:
    @functools.wraps(call)
    def named(*args: Any, **kwargs: Any) -> Any:
        with range_of(name):
            return call(*args, **kwargs)

    return named


def _short(elements: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if elements >= size:
            return f"{elements / size:.1f}{unit}"
    return str(elements)
