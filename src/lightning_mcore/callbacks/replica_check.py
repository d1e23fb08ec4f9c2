"""Checks that data-parallel ranks hold equal parameters.

What enters: this rank's parameters. What leaves: an error on all ranks if they differ from those of
another copy of the model. Every rank calls it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from typing_extensions import override

from lightning_mcore.callbacks._periodic import PeriodicCallback
from lightning_mcore.callbacks._ranks import (
    describe_rank,
    gather_objects,
    layout_of,
    layout_of_rank,
)
from lightning_mcore.errors import MCoreError

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from lightning_mcore.layout import Layout

__all__ = ["ReplicaCheck", "ReplicasDiffer", "digest", "first_difference"]


class ReplicasDiffer(MCoreError, RuntimeError):
    """Copies of a parameter that must be equal are not: training went on from wrong weights."""


class ReplicaCheck(PeriodicCallback):
    """Compares parameters over data-parallel ranks every ``every_n_steps`` optimizer steps.

    Ranks that hold copies of the same parameters compare a hash of each: data-parallel and
    context-parallel ones for dense parameters, and those with the same experts for experts'. Where
    they differ (a race, a faulty device, a user's own collective over the wrong group), every rank
    raises an error that names the first parameter and the ranks.

    With ``overlap_param_gather``, parameters are gathered first, as before evaluation.

    Cost: in a step that checks, copying all of this rank's parameters to the host and hashing them,
    about 1 s per GB, and one gather over gloo. In others nothing but a comparison.

    Args:
        every_n_steps: Optimizer steps between checks.

    Raises:
        ConfigurationError: If ``every_n_steps`` is less than 1.
    """

    def __init__(self, every_n_steps: int = 1000) -> None:
        super().__init__(every_n_steps)

    @override
    def _at_step(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if hasattr(trainer.strategy, "sync_parameters"):
            trainer.strategy.sync_parameters()
        mine = {
            name: (digest(param), not getattr(param, "allreduce", True))
            for name, param in pl_module.named_parameters()
        }
        found = first_difference(gather_objects(trainer, mine), layout_of(trainer))
        if found is not None:
            name, ranks = found
            places = ", ".join(describe_rank(trainer, rank) for rank in ranks)
            raise ReplicasDiffer(
                f"Parameter {name} must be equal on ranks that hold copies of it, but after step"
                f" {trainer.global_step} it differs on {places} from the first of them; resume from"
                " an earlier checkpoint, and check those ranks' devices and any collectives of"
                " your own."
            )


def digest(tensor: Tensor) -> bytes:
    """Hash of a tensor's bytes: equal for equal bit patterns, NaNs included."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8).cpu()
    return hashlib.blake2b(flat.numpy().tobytes(), digest_size=16).digest()


def first_difference(
    of_ranks: Sequence[Mapping[str, tuple[bytes, bool]]], layout: Layout | None
) -> tuple[str, list[int]] | None:
    """The first parameter whose copies differ, and the ranks that differ from the first copy.

    Args:
        of_ranks: By rank, for each parameter its hash and whether it belongs to an expert.
        layout: Says which ranks hold copies; ``None`` takes all ranks.
    """
    for rank, parameters in enumerate(of_ranks):
        for name, (mine, is_expert) in parameters.items():
            copies = _copies(layout, rank, is_expert, len(of_ranks))
            if rank != copies[0]:
                continue
            others = [r for r in copies if of_ranks[r].get(name, (None,))[0] != mine]
            if others:
                return name, others
    return None


def _copies(layout: Layout | None, rank: int, is_expert: bool, world_size: int) -> tuple[int, ...]:
    if layout is None:
        return tuple(range(world_size))
    return layout_of_rank(layout, rank).group_ranks("edp" if is_expert else "dp_cp")
