"""Splits one Lightning batch into the microbatches of a schedule.

Enters: the batch of one data-parallel rank and the numbers of the layout. Leaves: runs, each a
list of equally sized microbatches that one call of the engine's schedule takes. Pure; every rank of
a model-parallel group computes the same runs because it holds the same batch.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_mcore.errors import ConfigurationError

SplitHook = Callable[[Any, int], list[Any]]


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One microbatch on its way through the schedule."""

    data: Any
    size: int
    """Samples."""
    is_filler: bool = False
    """Repeats a real one because the schedule needs more microbatches; its results are dropped."""


@dataclass(frozen=True, slots=True)
class Run:
    """The microbatches of one schedule call, all of the same size."""

    microbatches: tuple[Microbatch, ...]

    @property
    def micro_batch_size(self) -> int:
        """Samples in each microbatch."""
        return self.microbatches[0].size


def batch_size(batch: Any) -> int:
    """Samples in a batch: the size of dim 0 of its first tensor with dimensions; 1 if it has none.

    A batch without tensors is one indivisible sample to the schedule.
    """
    return next((t.shape[0] for t in tensors_of(batch) if t.dim() > 0), 1)


def plan_training(
    batch: Any,
    *,
    micro_batch_size: int | None,
    pp: int,
    interleaved: bool,
    group_size: int | None = None,
    regular_batch_size: int | None = None,
    split: SplitHook | None = None,
) -> Run:
    """Cuts a training batch into equal microbatches.

    A batch shorter than ``regular_batch_size`` (the last one of an epoch) is cut into smaller
    microbatches if that comes out even; any other batch must divide.

    Args:
        batch: Batch of this data-parallel rank.
        micro_batch_size: Samples; ``None`` means the whole batch without pipelining, else 1.
        pp: Pipeline size.
        interleaved: Whether the schedule is interleaved, which takes multiples of ``pp``.
        group_size: Microbatches that a chunk runs in a row, where interleaved.
        regular_batch_size: Samples in a full batch, where one has been seen.
        split: The user's hook for batches that this module cannot cut.

    Raises:
        ConfigurationError: If the batch does not divide; on every rank of the layout alike.
    """
    multiple = pp if interleaved else 1
    if split is not None and (micro_batch_size is not None or pp > 1):
        run = _plan_by_hook(split(batch, micro_batch_size or 1), multiple)
        _check_groups(len(run.microbatches), pp, group_size)
        return run
    samples = batch_size(batch)
    wanted = micro_batch_size or (samples if pp == 1 else 1)
    if regular_batch_size is not None and samples < regular_batch_size:
        size = _largest_divisor(samples, wanted, multiple)
        if size is None:
            raise ConfigurationError(
                f"The last batch of the epoch has {samples} samples per data-parallel rank, which"
                f" cannot be cut into a multiple of `pp` ({pp}) microbatches, as the interleaved"
                " schedule needs; use drop_last=True in the DataLoader, or a dataset whose size"
                f" leaves a multiple of {pp}."
            )
        wanted = size
    _check_divides(samples, wanted, multiple)
    _check_groups(samples // wanted, pp, group_size)
    return Run(tuple(Microbatch(piece, wanted) for piece in split_batch(batch, wanted)))


def _plan_by_hook(pieces: Sequence[Any], multiple: int) -> Run:
    sizes = [batch_size(piece) for piece in pieces]
    if not sizes or len(set(sizes)) > 1:
        raise ConfigurationError(
            "The `split_batch` hook must return microbatches of one size for training, but they"
            f" have {sizes} samples; return a list of equally sized microbatches."
        )
    if len(sizes) % multiple:
        raise ConfigurationError(
            f"The `split_batch` hook returned {len(sizes)} microbatches, which must be a multiple"
            f" of `pp` ({multiple}) in the interleaved schedule; return"
            f" {(len(sizes) // multiple + 1) * multiple}."
        )
    return Run(tuple(Microbatch(piece, sizes[0]) for piece in pieces))


def _check_divides(samples: int, wanted: int, multiple: int) -> None:
    if samples % wanted:
        below = samples // wanted * wanted
        raise ConfigurationError(
            f"The batch of {samples} samples per data-parallel rank must be a multiple of"
            f" `micro_batch_size` ({wanted}); use a batch size of"
            f" {' or '.join(str(n) for n in sorted({max(below, wanted), below + wanted}))}, or a"
            f" `micro_batch_size` that divides {samples}."
        )
    count = samples // wanted
    if count % multiple:
        fitting = _largest_divisor(samples, wanted, multiple)
        raise ConfigurationError(
            f"`num_microbatches` ({count} = batch of {samples} samples / `micro_batch_size`"
            f" {wanted}) must be a multiple of `pp` ({multiple}) in the interleaved schedule; use a"
            f" batch size of {(count // multiple + 1) * multiple * wanted}"
            + (f" or `micro_batch_size={fitting}`." if fitting else ".")
        )


def _check_groups(count: int, pp: int, group_size: int | None) -> None:
    """The engine's own rule, which it states as a ValueError in the middle of a step."""
    if group_size is None:
        return
    name = "`microbatch_group_size_per_vp_stage`"
    if group_size > count:
        raise ConfigurationError(
            f"{name} ({group_size}) must be at most `num_microbatches` ({count}); use {pp} to"
            f" {count}, or smaller microbatches."
        )
    rest = count % group_size
    if 0 < rest < pp:
        raise ConfigurationError(
            f"`num_microbatches` ({count}) must leave nothing, or at least `pp` ({pp}), when"
            f" divided by {name} ({group_size}), but leaves {rest}; use a divisor of {count}, or"
            " None."
        )


def plan_evaluation(
    batch: Any,
    *,
    micro_batch_size: int | None,
    pp: int,
    interleaved: bool,
    split: SplitHook | None = None,
) -> list[Run]:
    """Cuts a batch of any size for forward-only schedules: full microbatches, then a smaller one.

    Where the interleaved schedule needs more microbatches than there are, real ones are repeated as
    fillers, whose results are dropped.
    """
    if split is not None and (micro_batch_size is not None or pp > 1):
        pieces = list(split(batch, micro_batch_size or 1))
    else:
        samples = batch_size(batch)
        pieces = split_batch(batch, micro_batch_size or (samples if pp == 1 else 1))
    runs = []
    for size, group in itertools.groupby(pieces, key=batch_size):
        real = [Microbatch(piece, size) for piece in group]
        missing = -len(real) % pp if interleaved else 0
        fillers = [dataclasses.replace(real[0], is_filler=True)] * missing
        runs.append(Run(tuple(real + fillers)))
    return runs


def split_batch(batch: Any, size: int) -> list[Any]:
    """Cuts ``batch`` along dim 0 into pieces of ``size`` samples, the last one possibly shorter.

    Tensors are cut along dim 0 (views, no copy), and so are sequences with one entry per sample;
    scalars, strings and other objects go into every piece as they are. Mappings, sequences, named
    tuples and dataclasses are rebuilt with their own type.

    Raises:
        ConfigurationError: If tensors disagree about the number of samples.
    """
    samples = batch_size(batch)
    if size >= samples:
        return [batch]
    return [
        _slice(batch, samples, start, min(start + size, samples))
        for start in range(0, samples, size)
    ]


def _slice(value: Any, samples: int, start: int, stop: int) -> Any:
    if isinstance(value, Tensor):
        if value.dim() == 0:
            return value
        if value.shape[0] != samples:
            raise ConfigurationError(
                f"Every tensor of a batch must have the same size in dim 0 to be cut into"
                f" microbatches, but one has shape {tuple(value.shape)} in a batch of {samples}"
                " samples; give the LightningModule a method `split_batch(batch,"
                " micro_batch_size)` that returns the list of microbatches."
            )
        return value[start:stop]
    if isinstance(value, (list, tuple)) and not any(True for _ in tensors_of(value)):
        return value[start:stop] if len(value) == samples else value
    return _rebuilt(value, lambda item: _slice(item, samples, start, stop))


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Applies ``change`` to every tensor in nested mappings, sequences and dataclasses.

    Containers are rebuilt with their own type; whatever else they hold stays as it is.
    """
    if isinstance(value, Tensor):
        return change(value)
    return _rebuilt(value, lambda item: map_tensors(item, change))


def _rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """A container of the same type with each of its entries changed; other values as they are."""
    if isinstance(value, Mapping):
        cut = {key: change(item) for key, item in value.items()}
        if isinstance(value, MutableMapping):
            # Keeps what else such a mapping holds, a default factory for example.
            same = copy.copy(value)
            same.update(cut)
            return same
        return type(value)(cut)  # type: ignore[call-arg]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {
            field.name: change(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if field.init
        }
        return dataclasses.replace(value, **changes)
    if isinstance(value, (list, tuple)):
        items = [change(item) for item in value]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*items)
        return type(value)(items)
    return value


def tensors_of(value: Any) -> Iterator[Tensor]:
    """All tensors in nested mappings, sequences and dataclasses, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_of(getattr(value, field.name))
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        for item in value:
            yield from tensors_of(item)


def _largest_divisor(samples: int, at_most: int, multiple: int) -> int | None:
    """Largest microbatch size <= ``at_most`` that gives a count that is a multiple of it."""
    for size in range(min(at_most, samples), 0, -1):
        if samples % size == 0 and (samples // size) % multiple == 0:
            return size
    return None
