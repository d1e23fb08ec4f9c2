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
from functools import lru_cache
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
    """What one rank logged under a key, put together only when the step is over.

    Until then one tensor operation per value: on a GPU each is a kernel launch, and there are as
    many as microbatches times keys.
    """

    values: dict[float, list[Tensor]] = field(default_factory=dict)
    """Values by their weight; most steps have one."""
    by_tokens: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Values with weights that only the device knows."""

    @property
    def weight(self) -> float:
        """Samples behind all values whose weight the host knows."""
        return sum(weight * len(values) for weight, values in self.values.items())

    def tokens(self, device: torch.device) -> Tensor | None:
        """Sum of the weights that only the device knows, as 0-dim fp64; ``None`` without any."""
        return _stack([w for _, w in self.by_tokens], device).sum() if self.by_tokens else None

    def add(self, value: Tensor, weight: float | Tensor) -> None:
        if isinstance(weight, Tensor):
            self.by_tokens.append((value, weight))
        else:
            self.values.setdefault(weight, []).append(value)

    def combined(self, reduction: str, device: torch.device) -> Tensor | None:
        """The weighted sum, or what ``reduction`` says, as 0-dim fp64 on ``device``."""
        terms: list[Tensor] = []
        for weight, values in self.values.items():
            group = _stack(values, device)
            if reduction in ("min", "max"):
                terms.append(group.amin() if reduction == "min" else group.amax())
            else:
                terms.append(group.sum() * (weight if reduction == "mean" else 1.0))
        if self.by_tokens:
            group = _stack([value for value, _ in self.by_tokens], device)
            if reduction in ("min", "max"):
                terms.append(group.amin() if reduction == "min" else group.amax())
            elif reduction == "mean":
                terms.append((group * _stack([w for _, w in self.by_tokens], device)).sum())
            else:
                terms.append(group.sum())
        if len(terms) < 2:
            return terms[0] if terms else None
        group = torch.stack(terms)
        if reduction in ("min", "max"):
            return group.amin() if reduction == "min" else group.amax()
        return group.sum()


def _stack(values: list[Tensor], device: torch.device) -> Tensor:
    """Stacks scalars as fp64, which keeps (value * weight) / weight equal to the fp32 value."""
    there = []
    for value in values:
        if value.device == device:
            there.append(value)
        elif value.device.type == "cpu":
            # A fill carries its number in the launch, where a copy would make the host wait.
            there.append(torch.full((), float(value), dtype=torch.float64, device=device))
        else:
            there.append(value.to(device))
    if len({value.dtype for value in there}) > 1:
        there = [value.to(torch.float64) for value in there]
    return torch.stack(there).to(torch.float64)


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
    _weight: float | Tensor | None = None
    _pending: list[tuple[LogKey, Tensor]] = field(default_factory=list)
    """What the running microbatch logged, until its weight is known."""

    @contextmanager
    def microbatch(self, samples: int | None) -> Iterator[None]:
        """Records calls with this weight; ``None`` drops them (earlier stages, fillers)."""
        self._weight = samples
        try:
            yield
            for key, value in self._pending:
                assert self._weight is not None, "dropped calls are not pending"
                self.entries[key].add(value, self._weight)
        finally:
            self._weight = None
            self._pending.clear()

    def weigh(self, tokens: Tensor) -> None:
        """Gives this weight, 0-dim, to what the running microbatch logged without one."""
        if self._weight is not None:
            self._weight = tokens

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
        if isinstance(value, Metric):
            path = settings_given.get("metric_attribute") or self.metric_path(value)
            latest = batch_value(value)
            key = LogKey(name, "none" if latest is None else "mean", path, settings)
            self._add(key, latest, batch_size)
            return
        key = LogKey(name, _reduction(settings_given.get("reduce_fx", "mean")), None, settings)
        self._add(key, value, batch_size)

    def _add(self, key: LogKey, value: Any, batch_size: int | None) -> None:
        entry = self.entries.setdefault(key, _Entry())
        if value is None:
            return
        if batch_size:
            entry.add(_as_scalar(key.name, value), float(batch_size))
        else:
            self._pending.append((key, _as_scalar(key.name, value)))

    def losses(self) -> list[Tensor]:
        """Losses of this rank's microbatches."""
        entry = self.entries.get(LogKey(LOSS, "mean"), _NOTHING)
        weighted = [value for values in entry.values.values() for value in values]
        return weighted + [value for value, _ in entry.by_tokens]

    def add_loss(self, loss: Tensor, weight: int | Tensor) -> None:
        """Adds one microbatch's loss, weighted by its samples or (0-dim) its tokens."""
        key = LogKey(LOSS, "mean")
        known = weight if isinstance(weight, Tensor) else float(weight)
        self.entries.setdefault(key, _Entry()).add(_as_scalar(LOSS, loss), known)


class LogExchange:
    """Gives every rank the same log entries. Collective over the world, once per step.

    Two collectives per step, which overlap: a vote over gloo by which the hosts find out, without
    waiting for any device, whether all of them know the keys of this step (and whether one of them
    wants to stop); and one on the device that sums the values. While the vote is under way, the
    values are laid out by the keys of the last steps, and again if it finds others. Only when keys
    are new are they sent around.

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
        self._latest: tuple[LogKey, ...] | None = None
        self._guess: tuple[LogKey, ...] | None = None
        """Keys of the last two steps, if they were the same; alike on every rank."""
        self.stop_wanted = 0
        """The highest vote at the latest exchange; alike on every rank."""
        self.training_ends = False
        """Whether any rank said so at the latest exchange; alike on every rank."""

    def __call__(
        self, log: StepLog, *, want_stop: int = 0, ends_training: bool = False
    ) -> list[Logged]:
        """Reduces ``log`` over the world; every rank calls it after each step's schedule.

        Args:
            log: Of this rank.
            want_stop: This rank's vote for ``stop_wanted``, 0 to go on.
            ends_training: This rank's vote for ``training_ends``.
        """
        entries = log.entries if self._is_source else {}
        mine = tuple(entries)
        if dist.get_world_size() == 1:
            self.stop_wanted, self.training_ends = want_stop, ends_training
            return self._reduce(mine, entries)
        low = torch.iinfo(torch.int64).min
        digest = _digest(mine)
        # One MAX finds both ends: the largest digest, and the smallest as a negated one. Ranks that
        # have no say send the neutral element.
        bounds = [digest, -digest] if self._is_source else [low, low]
        votes = torch.tensor([*bounds, int(want_stop), int(ends_training)])
        vote = dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self._world_cpu, async_op=True)
        guess = self._guess
        logged = self._reduce(guess, entries) if guess is not None else []
        assert vote is not None, "every rank is a member of the world"
        vote.wait()
        highest, negated, self.stop_wanted, ends = votes.tolist()
        self.training_ends = bool(ends)
        keys = self._agree(mine, highest, -negated)
        if keys != guess:
            logged = self._reduce(keys, entries)
        # Keys that change from step to step are not guessed: a wrong guess costs a reduction.
        self._guess = keys if keys == self._latest else None
        self._latest = keys
        return logged

    def _agree(self, mine: tuple[LogKey, ...], highest: int, lowest: int) -> tuple[LogKey, ...]:
        """The keys of this step on all ranks, given the largest and smallest digest."""
        if highest == lowest and highest in self._known:
            return self._known[highest]
        gathered: list[tuple[LogKey, ...] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, mine if self._is_source else None, group=self._world_cpu)
        union = tuple(dict.fromkeys(key for keys in gathered if keys for key in keys))
        if highest == lowest:
            self._known[highest] = union
        return union

    def _reduce(self, keys: Sequence[LogKey], entries: dict[LogKey, _Entry]) -> list[Logged]:
        if not keys:
            return []
        zero = torch.zeros((), dtype=torch.float64, device=self._device)
        filled = {0.0: zero}
        summed: list[Tensor] = []
        counted: list[Tensor] = []
        largest: list[Tensor] = []
        for key in keys:
            entry = entries.get(key, _NOTHING)
            value = entry.combined(key.reduction, self._device)
            extreme = key.reduction in ("min", "max")
            summed.append(zero if value is None or extreme else value)
            weight = entry.weight
            if weight not in filled:
                filled[weight] = zero + weight
            tokens = entry.tokens(self._device)
            counted.append(filled[weight] if tokens is None else filled[weight] + tokens)
            if extreme:
                sign = 1.0 if key.reduction == "max" else -1.0
                largest.append(zero - float("inf") if value is None else sign * value)
        # All keys at once: a few kernels per step instead of a few per key.
        stacked = torch.stack(summed + counted)
        extremes = torch.stack(largest) if largest else None
        if dist.get_world_size() > 1:
            dist.all_reduce(stacked)
            if extremes is not None:
                dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
        sums, weights = stacked.view(2, -1).unbind()
        # Counts, so at least 1 where there is anything; a mean over no tokens at all is 0.
        means = sums / weights.clamp(min=torch.finfo(torch.float64).tiny)
        by_reduction = {"sum": sums.float().unbind(), "mean": means.float().unbind()}
        limits = iter(() if extremes is None else extremes.float().unbind())
        logged: list[Logged] = []
        for index, (key, samples) in enumerate(zip(keys, weights.float().unbind(), strict=True)):
            if key.reduction in ("min", "max"):
                value = next(limits) * (1.0 if key.reduction == "max" else -1.0)
            else:
                value = by_reduction["mean" if key.reduction == "mean" else "sum"][index]
            logged.append(Logged(key, value, samples))
        return logged


_NOTHING = _Entry()


@lru_cache(maxsize=256)
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
    if isinstance(value, Tensor):
        tensor = value.detach()
    else:
        tensor = torch.tensor(float(value), dtype=torch.float64)
    if tensor.numel() != 1:
        raise ConfigurationError(
            f"`self.log({name}, tensor)` takes a tensor with one element, but it has shape"
            f" {tuple(tensor.shape)}; log its mean or a dict of its entries."
        )
    # A copy: the schedule scales the returned loss in place.
    return tensor.reshape(()).clone()
