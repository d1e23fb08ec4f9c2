"""Loaders as the loops see them: ranks stop together, and a resumed run goes on where it stopped.

A rank that runs out of batches while others go on would leave them waiting in a collective for
ever. Loaders with a length are compared once; loaders without one agree before every batch, over
gloo.

Lightning restores the position of loaders that can save it and lets others start anew in the middle
of an epoch. ``ResumableLoader`` gives plain training loaders a position: how many batches to skip,
and, per rank, the random state from which the epoch's order was drawn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_mcore import _lightning
from lightning_mcore.errors import ConfigurationError
from lightning_mcore.parallel_state import ParallelState

RandomState = tuple[Any, ...]


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
        kind = StatefulAgreeingLoader if saves_position(loader) else AgreeingLoader
        return kind(loader, state)
    if len(set(lengths)) > 1:
        raise ConfigurationError(
            "Every rank must have the same number of batches, but the loaders have"
            f" {lengths} by rank (-1: no length); use drop_last=True with a DistributedSampler, or"
            " give all ranks loaders without a length, which stop together."
        )
    return loader


def position_in_epoch(trainer: pl.Trainer) -> int:
    """Batches trained on in the running epoch; 0 once it has ended."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    at_end = progress.is_last_batch or progress.current.ready >= trainer.num_training_batches
    return 0 if at_end else int(progress.current.ready)


def saves_position(loader: Any) -> bool:
    """Whether a loader saves its position, such as torchdata's StatefulDataLoader."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def restores_order(loader: Any) -> bool:
    """Whether a loader that saves its position also finds its order again.

    Not with a sampler that Lightning has put around the loader's own to deal it to ranks
    (``DistributedSamplerWrapper``): it draws the whole order whenever an iterator is made, and
    torchdata makes several to restore one, each with another order.
    """
    return not any(isinstance(s, DistributedSamplerWrapper) for s in _samplers(loader))


def _samplers(loader: Any) -> list[Any]:
    """Samplers of a loader from the outermost to that which draws."""
    batches = getattr(loader, "batch_sampler", None)
    found = [batches, getattr(batches, "sampler", None), getattr(loader, "sampler", None)]
    inside = [_lightning.wrapped_sampler(sampler) for sampler in found]
    return [sampler for sampler in (*found, *inside) if sampler is not None]


def _generators(loader: Any) -> list[torch.Generator]:
    """Random streams of its own that a loader's order comes from."""
    owners = (loader, *_samplers(loader))
    found = [getattr(owner, "generator", None) for owner in owners]
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


class _LoaderAround:
    """Stands around a loader and shows its public attributes (dataset, sampler, ...)."""

    def __init__(self, loader: Any) -> None:
        shown = (
            {k: v for k, v in vars(loader).items() if not k.startswith("_")}
            if hasattr(loader, "__dict__")
            else {}
        )
        self.__dict__.update(shown)
        self.loader = loader

    @property
    def _iterator(self) -> Any:
        """The loader's running iterator, through which Lightning shuts its workers down."""
        return getattr(self.loader, "_iterator", None)

    @_iterator.setter
    def _iterator(self, value: Any) -> None:
        if hasattr(self.loader, "_iterator"):
            self.loader._iterator = value


class AgreeingLoader(_LoaderAround):
    """Iterates a loader without a length until the first rank has no batch left."""

    def __init__(self, loader: Any, state: ParallelState) -> None:
        super().__init__(loader)
        self._group = state.groups.world_cpu

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
    """The same for a loader that saves its position.

    A class of its own, because Lightning tells such loaders by these methods.
    """

    def state_dict(self) -> dict[str, Any]:
        """Position of the loader."""
        return dict(self.loader.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the position."""
        self.loader.load_state_dict(state_dict)


class ResumableLoader(_LoaderAround):
    """Gives a plain training loader a position within its epoch.

    Args:
        loader: Iterated anew for every epoch.
        position: Batches of the running epoch that have been trained on, 0 at its end.
        epoch_start: This rank's random state from a checkpoint, from which the order of the epoch
            that it interrupted was drawn; ``None`` if there is none.
    """

    def __init__(
        self, loader: Any, position: Callable[[], int], epoch_start: RandomState | None
    ) -> None:
        super().__init__(loader)
        self._position = position
        self._skip = 0
        self.epoch_start = epoch_start
        """Random state of this rank from which the running epoch's order was drawn."""

    def __len__(self) -> int:
        """Batches in an epoch, where the loader has a length."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """Yields the batches of an epoch, or those that are left of an interrupted one."""
        skip, self._skip = self._skip, 0
        if not skip:
            self.epoch_start = random_state(_generators(self.loader))
            yield from self.loader
            return
        now = random_state()
        if self.epoch_start is not None:
            set_random_state(self.epoch_start, _generators(self.loader))
        iterator = iter(self.loader)
        for _ in range(skip):
            next(iterator, None)
        # Skipping drew what the interrupted run had drawn before; go on from its latest state.
        set_random_state(now)
        yield from iterator

    def state_dict(self) -> dict[str, int]:
        """Batches to skip."""
        return {"batches": self._position()}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Skips as many batches in the next epoch that is iterated."""
        self._skip = int(state_dict.get("batches", 0))


class TrainLoaders:
    """Training loaders of one run, and the start of the epoch that they resume."""

    def __init__(self) -> None:
        self._epoch_start: RandomState | None = None
        self._made: list[ResumableLoader] = []

    def wrap(self, trainer: pl.Trainer, loader: Any) -> Any:
        """A training loader with a position, unless the loader keeps one itself."""
        if saves_position(loader) and restores_order(loader):
            return loader
        resumable = ResumableLoader(loader, partial(position_in_epoch, trainer), self._epoch_start)
        self._epoch_start = None
        self._made.append(resumable)
        return resumable

    @property
    def epoch_start(self) -> RandomState | None:
        """Random state of this rank from which the running epoch's order was drawn."""
        return self._made[-1].epoch_start if self._made else None

    def resume(self, epoch_start: RandomState | None) -> None:
        """Takes ``epoch_start`` from a checkpoint, before the first batch.

        Loaders may exist by then: ``trainer.estimated_stepping_batches`` makes them when a schedule
        is configured.
        """
        self._epoch_start = epoch_start
        if self._made:
            self._made[0].epoch_start, self._epoch_start = epoch_start, None


def random_state(generators: Sequence[torch.Generator] = ()) -> RandomState:
    """State of the host's random streams, from which loaders draw, and of ``generators``."""
    own = [generator.get_state() for generator in generators]
    return torch.get_rng_state(), random.getstate(), np.random.get_state(), *own


def set_random_state(state: RandomState, generators: Sequence[torch.Generator] = ()) -> None:
    """Restores ``random_state``."""
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])
    for generator, own in zip(generators, state[3:], strict=False):
        generator.set_state(own)


_NONE = object()
