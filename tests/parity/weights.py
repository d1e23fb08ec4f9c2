"""The same full weights in every layout: each parameter is filled from what it is globally.

The engine's sharded state dict says of every parameter which part of which full tensor it is. A
full tensor is drawn from a generator seeded by its key, and each rank keeps its part.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from torch import Tensor, nn

SCALE = 0.1


@dataclass(frozen=True)
class Shard:
    """A parameter of one rank, and its place in the full tensor."""

    key: str
    global_shape: tuple[int, ...]
    place: tuple[slice | int, ...]
    """Index of this part in the full tensor; a number for an axis of layers or experts."""
    source: Tensor
    """The parameter, or a copy of the part."""
    half: int | None = None
    """Which half of the parameter this is; ``None``: all of it. A gated unit has two."""

    @property
    def value(self) -> Tensor:
        """The part; not kept as a view, since the engine moves parameters into its buffers."""
        return self.source if self.half is None else self.source.chunk(2)[self.half]

    def copied(self) -> Shard:
        """The same with a value that training no longer changes."""
        value = self.value.detach().float().clone()
        return Shard(self.key, self.global_shape, self.place, value)


def shards_of(chunk: nn.Module) -> list[Shard]:
    """All parameters of a Megatron chunk; a tied output layer has the embedding's key."""
    metadata = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "singleton_local_shards": False,
    }
    parameters = {id(param) for param in chunk.parameters()}
    found = []
    seen = set()
    for whole in chunk.sharded_state_dict(metadata=metadata).values():
        if id(getattr(whole, "data", None)) not in parameters:
            continue
        seen.add(id(whole.data))
        # A gated unit's two halves are parts of their own.
        gated = isinstance(whole, ShardedTensorFactory)
        for half, entry in enumerate(whole.build() if gated else [whole]):
            shape = (1,) * entry.prepend_axis_num + tuple(entry.local_shape)
            place = tuple(
                start if axis < entry.prepend_axis_num else slice(start, start + size)
                for axis, (start, size) in enumerate(zip(entry.global_offset, shape, strict=True))
            )
            part = half if gated else None
            found.append(Shard(entry.key, tuple(entry.global_shape), place, whole.data, part))
    # A model that is whole ties by using one parameter twice; parts hold a copy each.
    assert seen == parameters, "every parameter has a shard"
    return found


def fill(chunk: nn.Module) -> list[Shard]:
    """Gives the chunk its part of the full weights; returns its shards.

    Vectors vary around the constant that they start with, so that a bias or a norm that is taken
    twice, or not at all, shows from the first step.
    """
    shards = shards_of(chunk)
    with torch.no_grad():
        for shard in shards:
            generator = torch.Generator().manual_seed(zlib.crc32(shard.key.encode()))
            full = SCALE * torch.randn(shard.global_shape, generator=generator)
            if shard.value.dim() == 1:
                full += shard.value.flatten()[0].item()
            shard.value.copy_(full[shard.place])
    return shards


def full_tensors(shards: Iterable[Shard]) -> dict[str, Tensor]:
    """Full tensors of a model that is whole, by key (a layer axis in front)."""
    full: dict[str, Tensor] = {}
    for shard in shards:
        full.setdefault(shard.key, torch.full(shard.global_shape, float("nan")))
        full[shard.key][shard.place] = shard.value
    assert all(tensor.isfinite().all() for tensor in full.values())
    return full


def check_shards(
    ranks: Iterable[Iterable[Shard]], expected: Mapping[str, Tensor], tolerance: float
) -> None:
    """Checks each copy of each part against the full tensors, and that no part is missing."""
    seen: dict[str, Tensor] = {key: torch.zeros(full.shape) for key, full in expected.items()}
    worst: tuple[float, Any] = (0.0, None)
    for rank, shards in enumerate(ranks):
        for shard in shards:
            full = expected[shard.key]
            assert shard.global_shape == tuple(full.shape), shard.key
            assert shard.value.isfinite().all(), (rank, shard.key)
            difference = (shard.value - full[shard.place]).abs().max().item()
            worst = max(worst, (difference, (rank, shard.key)), key=lambda pair: pair[0])
            seen[shard.key][shard.place] = 1.0
    assert worst[0] <= tolerance, f"off by {worst[0]:.2e} on (rank, key) {worst[1]}"
    missing = [key for key, marks in seen.items() if not marks.all()]
    assert not missing, f"no rank holds all of {missing}"
