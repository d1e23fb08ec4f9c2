"""Ranges of flattened parameters as boxes of what is stored of them."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_mcore._mcore.distopt_shards import boxes

shapes = st.lists(st.integers(1, 5), max_size=4)


@st.composite
def strided_views(draw):
    """A tensor that numbers its elements, and a view of it as the engine's factories make them."""
    shape = draw(shapes)
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    view = whole
    for axis, size in enumerate(shape):
        start = draw(st.integers(0, size - 1))
        view = view.narrow(axis, start, draw(st.integers(1, size - start)))
    order = draw(st.permutations(range(len(shape))))
    return whole, view.permute(order) if shape else view


@given(strided_views(), st.data())
def test_boxes_cover_what_lies_in_the_range_and_nothing_twice(views, data):
    whole, view = views
    start = data.draw(st.integers(0, whole.numel()))
    stop = data.draw(st.integers(start, whole.numel()))
    found = list(boxes(view.shape, view.stride(), view.storage_offset(), start, stop))
    covered = [
        number
        for box in found
        for number in view[tuple(slice(o, o + s) for o, s in box)].reshape(-1).tolist()
    ]
    assert sorted(covered) == sorted(n for n in view.reshape(-1).tolist() if start <= n < stop)
    assert len(found) <= 2 * max(view.dim(), 1)


def test_whole_rows_are_one_box():
    assert list(boxes((6, 4), (4, 1), 0, 4, 20)) == [[(1, 4), (0, 4)]]
    assert list(boxes((6, 4), (4, 1), 0, 2, 18)) == [
        [(1, 3), (0, 4)],
        [(0, 1), (2, 2)],
        [(4, 1), (0, 2)],
    ]
    assert list(boxes((), (), 3, 3, 4)) == [[]]
    assert list(boxes((2, 0), (1, 1), 0, 0, 4)) == []
