"""Which parts of which whole tensors a shard is, for reading it from somewhere else than shards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of a whole tensor."""

    key: str
    index: tuple[int, ...]
    """Place on the leading axes, which count layers or experts."""
    shape: tuple[int, ...]
    """Of the whole tensor without those axes."""
    offset: tuple[int, ...]
    """Of this part in it."""
    size: tuple[int, ...]
    """Of this part."""
    may_differ: bool
    """Whether the whole may have another shape (a padded vocabulary)."""
    dtype: Any


def slices_of(leaf: Any) -> list[Slice]:
    """The parts that make up a leaf of a tree; none for an object."""
    if isinstance(leaf, ShardedTensorFactory):
        return [_slice(part) for part in nested_values([leaf.build()])]
    return [_slice(leaf)] if isinstance(leaf, ShardedTensor) else []


def take(leaf: Any, read: Callable[[Slice], Tensor]) -> Tensor:
    """The local tensor of a leaf, from a function that reads its parts."""
    if isinstance(leaf, ShardedTensorFactory):
        parts = dict_list_map_inplace(lambda part: read(_slice(part)), leaf.build())
        return leaf.merge_fn(parts)
    return read(_slice(leaf))


def object_key(leaf: Any) -> str | None:
    """Key of a leaf that is an object."""
    return leaf.unique_key if isinstance(leaf, ShardedObject) else None


def _slice(part: ShardedTensor) -> Slice:
    axes = part.prepend_axis_num
    return Slice(
        key=part.key,
        index=tuple(part.global_offset[:axes]),
        shape=tuple(part.global_shape[axes:]),
        offset=tuple(part.global_offset[axes:]),
        size=tuple(part.local_shape),
        may_differ=bool(part.allow_shape_mismatch),
        dtype=part.dtype,
    )
