"""Arithmetic on sets of time intervals. Spans are ``(start, end)`` in microseconds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

__all__ = ["Span", "clip", "intersect", "length", "shared_lengths", "subtract", "union"]

Span: TypeAlias = tuple[float, float]


def union(spans: Iterable[Span]) -> list[Span]:
    """The same points of time as sorted spans that do not touch each other."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def clip(spans: Iterable[Span], start: float, end: float) -> list[Span]:
    """The parts of ``spans`` that lie between ``start`` and ``end``, in the given order."""
    cut = ((max(a, start), min(b, end)) for a, b in spans)
    return [(a, b) for a, b in cut if a < b]


def subtract(spans: Sequence[Span], covers: Sequence[Span]) -> list[Span]:
    """What of ``spans`` is outside ``covers``; both as ``union`` gives them."""
    left: list[Span] = []
    first = 0
    for start, end in spans:
        while first < len(covers) and covers[first][1] <= start:
            first += 1
        at = start
        index = first
        while index < len(covers) and covers[index][0] < end:
            if covers[index][0] > at:
                left.append((at, covers[index][0]))
            at = max(at, covers[index][1])
            index += 1
        if at < end:
            left.append((at, end))
    return left


def intersect(first: Sequence[Span], second: Sequence[Span]) -> list[Span]:
    """What is in both; both as ``union`` gives them."""
    return subtract(first, subtract(first, second))


def length(spans: Iterable[Span]) -> float:
    """Total time of spans that do not overlap."""
    return sum(end - start for start, end in spans)


def shared_lengths(sets: Sequence[Sequence[Span]]) -> list[float]:
    """Time of each set, counting a moment that lies in ``k`` of them as ``1/k`` for each.

    The results add up to the length of the union. Each set as ``union`` gives it.
    """
    edges = sorted(
        edge
        for index, spans in enumerate(sets)
        for start, end in spans
        for edge in ((start, 1, index), (end, 0, index))
    )
    shares = [0.0] * len(sets)
    open_sets: set[int] = set()
    before = 0.0
    for at, opens, index in edges:
        for member in open_sets:
            shares[member] += (at - before) / len(open_sets)
        before = at
        if opens:
            open_sets.add(index)
        else:
            open_sets.discard(index)
    return shares
