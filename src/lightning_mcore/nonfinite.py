"""Finds out where NaN or Inf in a gradient came from; costs nothing until there is one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mcore.names import PLAIN_PREFIX
from lightning_mcore.parallel_state import ParallelState

NonFinite = Literal["error", "skip", "warn"]
"""What to do about a gradient with NaN or Inf: stop, leave the step out, or say so and go on."""


@dataclass(frozen=True, slots=True)
class _Found:
    """What one rank found in its part of the model."""

    where: str
    losses: list[tuple[int, float]]
    """Microbatches whose loss is not finite, on the last stage."""
    stage: int
    """Place of the chunk with the parameter in the whole model."""
    name: str | None
    """First parameter, in the order of the backward pass, whose gradient is not finite."""
    affected: int
    total: int


def report(
    chunks: Sequence[nn.Module], losses: Sequence[Tensor], state: ParallelState, norm: float
) -> str:
    """What is not finite, on which rank. Collective over the world, over gloo; reads the device.

    Args:
        chunks: As the user built them; gradients are in their ``main_grad``.
        losses: Of this rank's microbatches, on the last stage.
        state: Layout and groups.
        norm: Of the whole gradient.
    """
    mine = _search(chunks, losses, state)
    gathered: list[Any] = [None] * state.layout.world_size
    if state.layout.world_size > 1:
        dist.all_gather_object(gathered, mine, group=state.groups.world_cpu)
    else:
        gathered = [mine]
    parts = [f"The gradient norm is {norm}."]
    for rank, found in enumerate(gathered):
        for index, value in found.losses[:1]:
            parts.append(
                f"The loss was {value} on rank {rank} ({found.where}), microbatch {index}."
            )
    named = [(found.stage, -rank, found) for rank, found in enumerate(gathered) if found.name]
    if named:
        _, negated, found = max(named, key=lambda item: item[:2])
        parts.append(
            f"First in the backward pass is the gradient of {found.name!r} on rank {-negated}"
            f" ({found.where}), one of {found.affected} of {found.total} parameters there."
        )
    return " ".join(parts)


def _search(chunks: Sequence[nn.Module], losses: Sequence[Tensor], state: ParallelState) -> _Found:
    layout = state.layout
    bad: list[tuple[int, str]] = []
    total = 0
    for index, chunk in enumerate(chunks):
        for name, param in chunk.named_parameters():
            grad = getattr(param, "main_grad", None)
            grad = param.grad if grad is None else grad
            total += 1
            if grad is not None and not bool(torch.isfinite(grad).all()):
                bad.append((index * layout.pp + layout.pp_rank, name.removeprefix(PLAIN_PREFIX)))
    values = [float(loss) for loss in losses]
    last = bad[-1] if bad else (-1, None)
    return _Found(
        where=coordinates(state),
        losses=[(i, v) for i, v in enumerate(values) if not _is_finite(v)],
        stage=last[0],
        name=last[1],
        affected=len(bad),
        total=total,
    )


def _is_finite(value: float) -> bool:
    return value - value == 0.0


def coordinates(state: ParallelState) -> str:
    """A rank's place in words."""
    layout = state.layout
    extra = f", cp {layout.cp_rank}" if layout.cp > 1 else ""
    return f"stage {layout.pp_rank}, tp {layout.tp_rank}, dp {layout.dp_rank}{extra}"
