"""What a rank owns of a distributed optimizer's state, as shards that are written where they are.

The engine's own description for checkpoints that can be resharded (``fully_reshardable``,
optimizer/distrib_optimizer.py, ``sharded_param_state_fully_reshardable``) first gathers the state
of the whole data-parallel group on every rank: for Adam 12 bytes per parameter of the model part,
where the rank is to write a ``dp``-th of it. But a rank owns a range of each flattened parameter,
and such a range is a few boxes in the parameter's own shape. Described as these, the state goes to
the same keys and whole tensors in the file, without a collective and without a copy; the engine
loads it like its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor

from lightning_mcore._mcore.adam_forms import owned_state

ENTRIES = ("param", "exp_avg", "exp_avg_sq")
"""What the engine stores of each parameter; the step is kept with the parameter groups."""
PREFIX = "optimizer.state."

Box = list[tuple[int, int]]
"""Offset and size on each axis."""


def owned_tree(part: Any, leaves: Mapping[int, Any]) -> dict[str, Any]:
    """Shards of what this rank owns of a distributed optimizer's state.

    Collective over the optimizer's data-parallel group only for parameters whose stored tensors
    are no views of them (``GroupedMLP`` with its transposed experts): these are gathered.

    Args:
        part: The engine's ``DistributedOptimizer``.
        leaves: Sharded tensors of the model by the ``id`` of their parameter.
    """
    tree: dict[str, Any] = {}
    for param, (start, stop) in _ranges(part):
        leaf = leaves[id(param)]
        state = owned_state(part, param) if start < stop else {}
        for entry in ENTRIES:
            if entry == "param" and param.dtype == torch.float32:
                # The main parameter is the model's own, which is in the checkpoint already.
                continue
            key = f"{PREFIX}{entry}.{leaf.key}"
            flat = state[entry].detach().float().view(-1) if start < stop else None
            views = _views(leaf, key)
            if views is None:
                found = [_gathered(leaf, key, flat, start, part.data_parallel_group)]
            elif flat is not None:
                instance = part.distributed_optimizer_instance_id
                found = [s for view in views for s in _shards(view, flat, start, instance)]
            else:
                found = []
            for shard in found:
                tree[str(len(tree))] = shard
    return tree


def _ranges(part: Any) -> Iterator[tuple[Tensor, tuple[int, int]]]:
    """Every parameter of the buffers, in the order of all ranks, with the range owned here."""
    owned = {
        param: (ranges["param"].start, ranges["param"].end)
        for buffer in part.gbuf_ranges
        for buckets in buffer.values()
        for bucket in buckets
        for param, ranges in bucket["param_map"].items()
    }
    for buffer in part.buffers:
        for param in buffer.param_index_map:
            yield param, owned.get(param, (0, 0))


def _views(leaf: Any, key: str) -> list[Any] | None:
    """The stored tensors of a parameter under ``key``, each with a view of it that has no memory.

    ``None`` if one of them is not a view.
    """
    whole = torch.empty(leaf.data.shape, device="meta")
    if not isinstance(leaf, ShardedTensorFactory):
        return [replace(leaf, key=key, data=whole, dtype=whole.dtype)]
    parts = list(nested_values([replace(leaf, key=key, data=whole).build()]))
    same = all(
        isinstance(part, ShardedTensor) and (part.data is whole or part.data._base is whole)
        for part in parts
    )
    return parts if same else None


def _shards(view: Any, flat: Tensor, start: int, instance: int) -> Iterator[ShardedTensor]:
    """What ``flat``, which begins at element ``start`` of a parameter, has of a stored tensor."""
    strides, first, axes = view.data.stride(), view.data.storage_offset(), view.prepend_axis_num
    replica = view.replica_id if isinstance(view.replica_id, tuple) else (view.replica_id,)
    for box in boxes(view.data.shape, strides, first, start, start + flat.numel()):
        place = first + sum(o * stride for (o, _), stride in zip(box, strides, strict=True))
        sizes = tuple(size for _, size in box)
        data = flat.as_strided(sizes, strides, flat.storage_offset() + place - start)
        shape = (1,) * axes + sizes
        inside = [0] * axes + [offset for offset, _ in box]
        yield ShardedTensor(
            key=view.key,
            data=data.view(shape),
            dtype=flat.dtype,
            local_shape=shape,
            global_shape=view.global_shape,
            global_offset=tuple(o + i for o, i in zip(view.global_offset, inside, strict=True)),
            # Ranks own pieces of different shapes, which form no grid.
            axis_fragmentations=None,
            # In place of the data-parallel rank: each owns something else.
            replica_id=(*replica[:-1], instance),
            allow_shape_mismatch=view.allow_shape_mismatch,
        )


def boxes(
    shape: Sequence[int], strides: Sequence[int], first: int, start: int, stop: int
) -> Iterator[Box]:
    """The elements of a strided view that lie in a range of its memory, as few boxes.

    Args:
        shape: Of the view.
        strides: Of the view, elements; no two of its elements share a place.
        first: Place of its first element.
        start: Where the range begins.
        stop: Behind the range's end.
    """
    order = sorted(range(len(shape)), key=lambda axis: (-strides[axis], -shape[axis]))
    if 0 in shape:
        return
    for box in _boxes([(shape[axis], strides[axis]) for axis in order], first, start, stop):
        yield [box[order.index(axis)] for axis in range(len(shape))]


def _boxes(axes: list[tuple[int, int]], first: int, start: int, stop: int) -> Iterator[Box]:
    if not axes:
        if start <= first < stop:
            yield []
        return
    (size, stride), inner = axes[0], axes[1:]
    stride = max(stride, 1)
    span = 1 + sum((count - 1) * step for count, step in inner)
    # Entries of this axis that the range touches, and those that it covers.
    low = max(0, -((first + span - 1 - start) // stride))
    high = min(size, (stop - 1 - first) // stride + 1)
    whole_low = max(low, -((first - start) // stride))
    whole_high = min(high, (stop - span - first) // stride + 1)
    if whole_low < whole_high:
        yield [(whole_low, whole_high - whole_low), *((0, count) for count, _ in inner)]
    else:
        whole_low = whole_high = high
    for entry in (*range(low, whole_low), *range(whole_high, high)):
        for box in _boxes(inner, first + entry * stride, start, stop):
            yield [(entry, 1), *box]


def _gathered(
    leaf: Any, key: str, flat: Tensor | None, start: int, group: dist.ProcessGroup
) -> Any:
    """A parameter's whole state, as the engine describes it. Collective over ``group``."""
    whole = torch.zeros(leaf.data.numel(), device=leaf.data.device)
    if flat is not None:
        whole[start : start + flat.numel()] = flat
    dist.all_reduce(whole, group=group)
    whole = whole.view(leaf.data.shape)
    if isinstance(leaf, ShardedTensorFactory):
        return replace(leaf, key=key, data=whole)
    return replace(leaf, key=key, data=whole, dtype=whole.dtype)
