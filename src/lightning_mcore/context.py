"""Context parallelism: which part of each sequence a rank holds.

Enters: a microbatch that all context-parallel peers hold alike. Leaves: this rank's part of it, in
the engine's zigzag order: a sequence is cut into ``2 x cp`` chunks and rank ``r`` takes chunks
``r`` and ``2 x cp - 1 - r``, so that under a causal mask all ranks have the same work. Pure, but
for ``gather_sequences``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mcore.batch import map_tensors, tensors_of
from lightning_mcore.errors import ConfigurationError

ShardHook = Callable[[Any, int, int], Any]
"""``shard_batch(batch, cp, cp_rank) -> batch``: the user's own cut of one microbatch."""


@dataclass(frozen=True, slots=True)
class SequenceShard:
    """Cuts microbatches for one rank of a context-parallel group."""

    cp: int
    """Context-parallel size."""
    cp_rank: int
    """Position in the group."""
    seq_length: int | None = None
    """Tokens in a whole sequence, where the batch has no token ids that show them."""
    hook: ShardHook | None = None
    """The LightningModule's ``shard_batch``, where it has one."""

    def __call__(self, batch: Any) -> Any:
        """This rank's part of a microbatch.

        With ``s`` tokens in a sequence, tensors ``[b, s, ...]`` are cut along dim 1 and attention
        masks ``[b, 1, s, s]`` along dim 2 (the queries; keys stay whole). All others, such as
        ``[b]``, stay whole. ``s`` is ``seq_length``, or the size of dim 1 of the integer tensors
        with two dimensions.

        Raises:
            ConfigurationError: If the length cannot be told, no tensor has it, or it is not a
                multiple of ``2 x cp``; on every rank alike.
        """
        if self.cp == 1:
            return batch
        if self.hook is not None:
            return self.hook(batch, self.cp, self.cp_rank)
        length = sequence_length(batch, self.seq_length)
        if length % (2 * self.cp):
            below = max(length // (2 * self.cp), 1) * 2 * self.cp
            raise ConfigurationError(
                f"The sequence length of the batch ({length}) must be a multiple of 2 x `cp`"
                f" ({self.cp}) = {2 * self.cp}, since each rank takes one chunk from either half;"
                f" pad sequences to {below} or {below + 2 * self.cp} tokens."
            )
        positions = zigzag_positions(length, self.cp, self.cp_rank)

        def cut(tensor: Tensor) -> Tensor:
            dim = _sequence_dim(tensor, length)
            return tensor if dim is None else tensor.index_select(dim, positions.to(tensor.device))

        return map_tensors(batch, cut)


def sequence_length(batch: Any, told: int | None) -> int:
    """Tokens in a whole sequence of ``batch``.

    Raises:
        ConfigurationError: If it cannot be told, or no tensor of the batch has the length told.
    """
    if told is not None:
        if not any(_sequence_dim(tensor, told) is not None for tensor in tensors_of(batch)):
            shapes = [tuple(tensor.shape) for tensor in tensors_of(batch)]
            raise ConfigurationError(
                f"No tensor of the batch has `seq_length` ({told}) tokens in dim 1 (shapes"
                f" {shapes}), so context parallelism cannot cut it; use batches [b, {told}, ...],"
                " or give the LightningModule a method `shard_batch(batch, cp, cp_rank)`."
            )
        return told
    lengths = sorted(
        {
            tensor.shape[1]
            for tensor in tensors_of(batch)
            if tensor.dim() == 2
            and not tensor.dtype.is_floating_point
            and tensor.dtype != torch.bool
        }
    )
    if len(lengths) != 1:
        raise ConfigurationError(
            "Context parallelism cuts tensors [b, s, ...] along the sequence and reads s from the"
            f" integer tensors with two dimensions, which have sizes {lengths} in dim 1; set"
            " MCoreStrategy(seq_length=...), or give the LightningModule a method"
            " `shard_batch(batch, cp, cp_rank)`."
        )
    return lengths[0]


def zigzag_positions(seq_length: int, cp: int, cp_rank: int) -> Tensor:
    """Positions ``[s / cp]`` in the whole sequence of the tokens that a rank holds, in order."""
    chunks = torch.arange(seq_length).view(2 * cp, -1)
    return torch.cat([chunks[cp_rank], chunks[2 * cp - 1 - cp_rank]])


def position_ids(tokens: Tensor, cp: int, cp_rank: int) -> Tensor:
    """Positions ``[b, s / cp]`` in the whole sequence of a shard ``tokens`` ``[b, s / cp]``."""
    positions = zigzag_positions(tokens.shape[1] * cp, cp, cp_rank)
    return positions.to(tokens.device).expand(tokens.shape[0], -1)


def check_model_call(args: tuple[Any, ...], kwargs: dict[str, Any], shard: Any) -> None:
    """Checks what a step made of its shard: two ways to be wrong without an error.

    Args:
        args: Of the model call.
        kwargs: Of the model call.
        shard: What the step was given.

    Raises:
        ConfigurationError: If position ids count the tokens of the shard instead of those of the
            sequence, or the model gets sequences of another length than the shard's.
    """
    lengths = {tensor.shape[1] for tensor in tensors_of(shard) if tensor.dim() > 1}
    for tensor in tensors_of([args, kwargs]):
        if tensor.dim() != 2 or tensor.dtype not in (torch.int64, torch.int32):
            continue
        length = tensor.shape[1]
        if length not in lengths and length + 1 in lengths:
            raise ConfigurationError(
                f"The model is called with {length} tokens where the shard has {length + 1}: under"
                " context parallelism a step cannot shift tokens into labels, because the next"
                " token of a chunk's last one is on another rank; shift them in the dataset."
            )
        counted = torch.arange(length, device=tensor.device, dtype=tensor.dtype)
        if length > 1 and bool((tensor == counted).all()):
            raise ConfigurationError(
                f"The model is called with position ids 0 to {length - 1}, but a context-parallel"
                " rank holds tokens from both halves of the sequence; use"
                " self.trainer.strategy.position_ids(tokens), or put position ids in the batch."
            )


def gather_sequences(value: Any, shard_length: int, group: dist.ProcessGroup) -> Any:
    """Joins the sequences of all ranks of ``group`` in their original order; collective over it.

    Args:
        value: What this rank's step returned. Tensors ``[b, shard_length, ...]`` are joined along
            dim 1; everything else stays as this rank has it.
        shard_length: Tokens of a sequence on one rank.
        group: The context-parallel group.

    Returns:
        The same with tensors ``[b, cp x shard_length, ...]``.
    """
    cp = dist.get_world_size(group)
    order = torch.cat([zigzag_positions(cp * shard_length, cp, rank) for rank in range(cp)])
    inverse = torch.argsort(order)

    def join(tensor: Tensor) -> Tensor:
        if tensor.dim() < 2 or tensor.shape[1] != shard_length:
            return tensor
        # gloo does not gather bool.
        wire = torch.uint8 if tensor.dtype == torch.bool else tensor.dtype
        mine = tensor.detach().to(wire).contiguous()
        parts = [torch.empty_like(mine) for _ in range(cp)]
        dist.all_gather(parts, mine, group=group)
        whole = torch.cat(parts, dim=1).index_select(1, inverse.to(tensor.device))
        return whole.to(tensor.dtype)

    return map_tensors(value, join)


def _sequence_dim(tensor: Tensor, length: int) -> int | None:
    if tensor.dim() > 1 and tensor.shape[1] == length:
        return 1
    if tensor.dim() == 4 and tensor.shape[2] == tensor.shape[3] == length:
        return 2
    return None
