"""Keeps data-parallel ranks together when their loaders do not have the same number of batches.

A rank that runs out of batches while others go on would leave them waiting in a collective for
ever. Loaders with a length are compared once; loaders without one agree before every batch, over
gloo.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_mcore.errors import ConfigurationError
from lightning_mcore.parallel_state import ParallelState


def agreeing_loader(loader: Any, state: ParallelState) -> Any:
    """Returns ``loader`` if all ranks have equally many batches, else one that stops together.

    Collective over the world, over gloo.

    Raises:
        ConfigurationError: If loaders with a length differ in it, naming the lengths by rank.
    """
    if state.layout.world_size == 1:
        return loader
    length = sized_len(loader)
    mine = torch.tensor([-1 if length is None else length])
    gathered = [torch.empty_like(mine) for _ in range(state.layout.world_size)]
    dist.all_gather(gathered, mine, group=state.groups.world_cpu)
    lengths = [int(item) for item in gathered]
    if all(item == -1 for item in lengths):
        stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        return (StatefulAgreeingLoader if stateful else AgreeingLoader)(loader, state)
    if len(set(lengths)) > 1:
        raise ConfigurationError(
            "Every rank must have the same number of batches, but the loaders have"
            f" {lengths} by rank (-1: no length); use drop_last=True with a DistributedSampler, or"
            " give all ranks loaders without a length, which stop together."
        )
    return loader


class AgreeingLoader:
    """Iterates a loader without a length until the first rank has no batch left."""

    def __init__(self, loader: Any, state: ParallelState) -> None:
        self.loader = loader
        self._group = state.groups.world_cpu
        for name in ("dataset", "sampler", "batch_sampler", "num_workers", "batch_size"):
            # What Lightning looks at: worker checks, sampler epochs.
            if hasattr(loader, name):
                setattr(self, name, getattr(loader, name))

    def __iter__(self) -> Iterator[Any]:
        """Yields batches while every rank has one."""
        iterator, count = iter(self.loader), 0
        while True:
            batch = next(iterator, _NONE)
            left = torch.tensor([0 if batch is _NONE else 1])
            dist.all_reduce(left, group=self._group)
            if int(left) < dist.get_world_size():
                if int(left) > 0:
                    rank_zero_warn(
                        f"After {count} batches, {dist.get_world_size() - int(left)} of"
                        f" {dist.get_world_size()} ranks had no data left; all ranks stop here and"
                        " the others drop their next batch. Give every data-parallel rank equally"
                        " many batches to use all data."
                    )
                return
            count += 1
            yield batch


class StatefulAgreeingLoader(AgreeingLoader):
    """The same for a loader that saves its position, such as torchdata's StatefulDataLoader.

    A class of its own, because Lightning restores the position of loaders by whether they have
    these methods, and skips batches itself for the others.
    """

    def state_dict(self) -> dict[str, Any]:
        """Position of the loader."""
        return dict(self.loader.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the position."""
        self.loader.load_state_dict(state_dict)


_NONE = object()
