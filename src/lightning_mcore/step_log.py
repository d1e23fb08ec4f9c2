"""Makes what a step logs the same on every rank.

In a step, ``self.log`` runs once per microbatch, and behind the model call only on the last stage.
``StepLog`` records those calls; ``exchange`` reduces the values over microbatches and data-parallel
ranks and gives every rank of the world the same list, which is then logged for real. Since all
ranks log the same values, nothing is left to synchronise at the end of an epoch, and keys that
differ between ranks or steps cannot deadlock.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric

from lightning_mcore.errors import ConfigurationError
from lightning_mcore.metrics import batch_value

LOSS = "loss of the step"
"""Key under which the returned loss travels; a space keeps it apart from logged names."""

ALREADY_REDUCED = object()
"""Stands for the group of a value that every rank holds alike: reducing it changes nothing. Saying
so, rather than ``sync_dist=False``, keeps Lightning from advising to synchronise it."""

_REDUCTIONS = {
    "mean": "mean",
    "avg": "mean",
    "sum": "sum",
    "min": "min",
    "max": "max",
    "amax": "max",
    "amin": "min",
}
_NOT_FORWARDED = ("sync_dist", "sync_dist_group", "rank_zero_only", "batch_size", "reduce_fx")


@dataclass(frozen=True, slots=True)
class LogKey:
    """One logged name with its settings: what ranks must agree on."""

    name: str
    reduction: str
    """``mean``, ``sum``, ``min`` or ``max``, over microbatches, ranks and (by Lightning) steps;
    ``none`` for a torchmetrics object that was updated without computing a value of the batch."""
    metric: str | None = None
    """Attribute path of a torchmetrics object; its value is computed by itself, not reduced
    here."""
    settings: tuple[tuple[str, Any], ...] = ()
    """Further arguments of ``self.log``, sorted by name."""


@dataclass(slots=True)
class _Entry:
    value: Tensor | None = None
    weight: float = 0.0

    def add(self, value: Tensor, weight: float, reduction: str) -> None:
        term = value * weight if reduction == "mean" else value
        if self.value is None:
            self.value = term
        elif reduction in ("mean", "sum"):
            self.value = self.value + term
        else:
            self.value = getattr(torch, f"{reduction}imum")(self.value, term)
        self.weight += weight


@dataclass(frozen=True, slots=True)
class Logged:
    """A value that every rank holds alike after the exchange."""

    key: LogKey
    value: Tensor
    """0-dim fp32; of a torchmetrics object, its value for the latest batch."""
    weight: Tensor
    """Samples behind the value, over all data-parallel ranks."""


@dataclass(slots=True)
class StepLog:
    """Records the ``self.log`` calls of one step on one rank."""

    metric_path: Callable[[Metric], str]
    entries: dict[LogKey, _Entry] = field(default_factory=dict)
    _weight: float | None = None

    @contextmanager
    def microbatch(self, samples: int | None) -> Iterator[None]:
        """Records calls with this weight; ``None`` drops them (earlier stages, fillers)."""
        self._weight = samples
        try:
            yield
        finally:
            self._weight = None

    def log(self, name: str, value: Any, **settings_given: Any) -> None:
        """Stands in for ``LightningModule.log`` during a step; takes its arguments by keyword."""
        if self._weight is None:
            return
        batch_size = settings_given.get("batch_size")
        settings = tuple(
            sorted(
                (k, v)
                for k, v in settings_given.items()
                if k not in _NOT_FORWARDED and v is not None
            )
        )
        weight = float(batch_size or self._weight)
        if isinstance(value, Metric):
            path = settings_given.get("metric_attribute") or self.metric_path(value)
            latest = batch_value(value)
            key = LogKey(name, "none" if latest is None else "mean", path, settings)
            entry = self.entries.setdefault(key, _Entry())
            if latest is not None:
                entry.add(_as_scalar(name, latest), weight, "mean")
            return
        key = LogKey(name, _reduction(settings_given.get("reduce_fx", "mean")), None, settings)
        self.entries.setdefault(key, _Entry()).add(_as_scalar(name, value), weight, key.reduction)

    def add_loss(self, loss: Tensor, samples: int) -> None:
        """Adds one microbatch's loss."""
        key = LogKey(LOSS, "mean")
        self.entries.setdefault(key, _Entry()).add(_as_scalar(LOSS, loss), float(samples), "mean")


class LogExchange:
    """Gives every rank the same log entries. Collective over the world, once per step.

    Two collectives per step: one over gloo by which the hosts find out, without waiting for any
    device, whether all of them know the keys of this step; and one on the device that sums the
    values. Only when the keys are new are they sent around.

    Args:
        world_cpu: Gloo group of all ranks.
        is_source: Whether this rank's entries count: on the last stage, and one rank of each
            tensor-parallel group.
        device: Where values are reduced.
    """

    def __init__(
        self, world_cpu: dist.ProcessGroup, *, is_source: bool, device: torch.device
    ) -> None:
        self._world_cpu = world_cpu
        self._is_source = is_source
        self._device = device
        self._known: dict[int, tuple[LogKey, ...]] = {}

    def __call__(self, log: StepLog) -> list[Logged]:
        """Reduces ``log`` over the world; every rank calls it after each step's schedule."""
        entries = log.entries if self._is_source else {}
        keys = self._agree(tuple(entries))
        values = self._reduce(keys, entries)
        return [
            Logged(key, value, weight) for key, (value, weight) in zip(keys, values, strict=True)
        ]

    def _agree(self, mine: tuple[LogKey, ...]) -> tuple[LogKey, ...]:
        if dist.get_world_size() == 1:
            return mine
        low = torch.iinfo(torch.int64).min
        digest = _digest(mine)
        # One MAX finds both ends: the largest digest, and the smallest as a negated one. Ranks that
        # have no say send the neutral element.
        ends = torch.tensor([digest, -digest] if self._is_source else [low, low])
        dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=self._world_cpu)
        highest, lowest = int(ends[0]), -int(ends[1])
        if highest == lowest and highest in self._known:
            return self._known[highest]
        gathered: list[tuple[LogKey, ...] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, mine if self._is_source else None, group=self._world_cpu)
        union = tuple(dict.fromkeys(key for keys in gathered if keys for key in keys))
        if highest == lowest:
            self._known[highest] = union
        return union

    def _reduce(
        self, keys: Sequence[LogKey], entries: dict[LogKey, _Entry]
    ) -> list[tuple[Tensor, Tensor]]:
        summed: list[Tensor] = []
        largest: list[Tensor] = []
        for key in keys:
            entry = entries.get(key)
            value = entry.value if entry is not None else None
            extreme = key.reduction in ("min", "max")
            missing = torch.zeros((), dtype=torch.float64, device=self._device)
            # fp64 keeps (value * weight) / weight equal to the fp32 value.
            summed.append(
                missing if value is None or extreme else value.to(self._device, torch.float64)
            )
            summed.append(missing + (entry.weight if entry is not None else 0.0))
            if extreme:
                sign = 1.0 if key.reduction == "max" else -1.0
                largest.append(
                    missing - float("inf")
                    if value is None
                    else sign * value.to(self._device, torch.float64)
                )
        sums = _all_reduce(summed, dist.ReduceOp.SUM)
        extremes = iter(_all_reduce(largest, dist.ReduceOp.MAX))
        pairs = iter(zip(sums[0::2], sums[1::2], strict=True))
        results: list[tuple[Tensor, Tensor]] = []
        for key in keys:
            total, weight = next(pairs)
            if key.reduction == "mean":
                total = total / weight
            elif key.reduction in ("min", "max"):
                total = next(extremes) * (1.0 if key.reduction == "max" else -1.0)
            results.append((total.float(), weight.float()))
        return results


def _all_reduce(values: list[Tensor], op: Any) -> list[Tensor]:
    if not values:
        return []
    stacked = torch.stack(values)
    if dist.get_world_size() > 1:
        dist.all_reduce(stacked, op=op)
    return list(stacked.unbind())


def _digest(keys: tuple[LogKey, ...]) -> int:
    """A positive 62-bit number that is the same for the same keys in every process."""
    text = repr(keys).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 2


def _reduction(reduce_fx: Any) -> str:
    name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
    if name.lower() not in _REDUCTIONS:
        raise ConfigurationError(
            f"`reduce_fx` ({reduce_fx!r}) of self.log must be one of 'mean', 'sum', 'min', 'max':"
            " the values of a step come from several microbatches and ranks."
        )
    return _REDUCTIONS[name.lower()]


def _as_scalar(name: str, value: Any) -> Tensor:
    tensor = value.detach() if isinstance(value, Tensor) else torch.tensor(float(value))
    if tensor.numel() != 1:
        raise ConfigurationError(
            f"`self.log({name}, tensor)` takes a tensor with one element, but it has shape"
            f" {tuple(tensor.shape)}; log its mean or a dict of its entries."
        )
    # A copy: the schedule scales the returned loss in place.
    return tensor.reshape(()).to(torch.float64, copy=True)
