"""What the figures of trials mean: is it the same training, is it faster, what to use.

Pure. A trial is *the same training* if every loss and gradient norm lies within the tolerance of
the baseline's first round, and *faster* if it beat the baseline by ``LEAST_GAIN`` in every round.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_mcore.tuning.trials import Measurement, Refusal, Trial

__all__ = [
    "FLOORS",
    "LEAST_GAIN",
    "Parity",
    "Report",
    "Row",
    "check_parity",
    "judge",
    "shown_arguments",
    "strategy_call",
    "tolerances",
]

FLOORS = {"32-true": (1e-5, 1e-4)}
"""By precision: relative differences of loss and gradient norm that the order of summation alone
can make, which is what the parity tests of this package allow. Other precisions: ``_LOW``."""

_LOW = (2e-2, 5e-2)
LEAST_GAIN = 0.01
"""Part of the baseline's time that a trial must save in every round. Of less, two rounds of a few
seconds say nothing: blocks of one setting, on two H200s that did nothing else, differed by 1 %
(benchmarks/RESULTS.md)."""

_REPEATS = 3.0
"""A trial may differ by this many times what the baseline's own repeats differ by: the largest of
a few draws is exceeded by another draw easily, by three times it rarely."""


@dataclass(frozen=True, kw_only=True)
class Parity:
    """How far a trial's training is from the baseline's."""

    loss: float
    """Largest relative difference of a step's loss; infinite if one is not finite."""
    grad_norm: float
    """Likewise of the gradient norm."""
    loss_tolerance: float
    grad_norm_tolerance: float

    @property
    def holds(self) -> bool:
        """Whether both are finite and within their tolerances."""
        return (
            math.isfinite(self.loss)
            and math.isfinite(self.grad_norm)
            and self.loss <= self.loss_tolerance
            and self.grad_norm <= self.grad_norm_tolerance
        )


@dataclass(frozen=True, kw_only=True)
class Row:
    """One trial with its verdict."""

    measured: Measurement
    ratio: float
    """Median over rounds of this trial's step time through the baseline's in the same round."""
    spread: tuple[float, float]
    """Smallest and largest of these ratios."""
    parity: Parity

    @property
    def name(self) -> str:
        """The trial's name."""
        return self.measured.trial.name

    @property
    def wins(self) -> bool:
        """Whether it is the same training and was clearly faster in every round."""
        return self.parity.holds and self.spread[1] <= 1.0 - LEAST_GAIN


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a tuner found. Made by ``judge``."""

    rows: Sequence[Row]
    """Trials that ran, the baseline first."""
    refused: Sequence[Refusal] = ()
    """Trials that the strategy refused, with its reason."""
    precision: str = "32-true"
    setting: Mapping[str, Any] = field(default_factory=dict)
    """Where it was measured: versions, devices, steps, rounds."""

    @property
    def baseline(self) -> Row:
        """The run that others are compared with."""
        return self.rows[0]

    @property
    def winners(self) -> list[Row]:
        """Trials worth using, the fastest first."""
        return sorted((row for row in self.rows[1:] if row.wins), key=lambda row: row.ratio)

    @property
    def recommended(self) -> Row:
        """The fastest trial that is the same training; the baseline if none was faster."""
        return self.winners[0] if self.winners else self.baseline


def _largest_difference(found: Sequence[float], expected: Sequence[float]) -> float:
    """Largest relative difference, step by step; infinite where a value is missing or not finite.

    Relative to the larger of the two, so that a gradient norm near zero cannot hide behind it.
    """
    if len(found) != len(expected) or not found:
        return math.inf
    largest = 0.0
    for one, other in zip(found, expected, strict=True):
        if not (math.isfinite(one) and math.isfinite(other)):
            return math.inf
        scale = max(abs(one), abs(other))
        if scale:
            largest = max(largest, abs(one - other) / scale)
    return largest


def tolerances(baseline: Measurement, precision: str) -> tuple[float, float]:
    """Allowed relative differences of loss and gradient norm.

    The larger of the floor of the precision and three times what the baseline's own rounds differ
    by, which ran on the same weights and data.
    """
    floors = FLOORS.get(precision, _LOW)
    loss = max(
        (_largest_difference(again, baseline.losses[0]) for again in baseline.losses[1:]),
        default=0.0,
    )
    norm = max(
        (_largest_difference(again, baseline.grad_norms[0]) for again in baseline.grad_norms[1:]),
        default=0.0,
    )
    return max(floors[0], _REPEATS * loss), max(floors[1], _REPEATS * norm)


def check_parity(found: Measurement, baseline: Measurement, allowed: tuple[float, float]) -> Parity:
    """Compares all rounds of a trial with the baseline's first one."""
    return Parity(
        loss=max(_largest_difference(once, baseline.losses[0]) for once in found.losses),
        grad_norm=max(
            _largest_difference(once, baseline.grad_norms[0]) for once in found.grad_norms
        ),
        loss_tolerance=allowed[0],
        grad_norm_tolerance=allowed[1],
    )


def judge(
    measured: Sequence[Measurement],
    refused: Sequence[Refusal],
    *,
    precision: str,
    setting: Mapping[str, Any],
    baselines: Mapping[str, Sequence[float]] | None = None,
) -> Report:
    """Turns measurements into a report.

    Args:
        measured: Trials that ran, the baseline first.
        refused: Trials that did not.
        precision: ``Trainer(precision=...)``.
        setting: For the reader.
        baselines: The baseline's step times of the same rounds, by trial name, for trials of a
            later phase; others are compared with the baseline's own.
    """
    base = measured[0]
    allowed = tolerances(base, precision)
    rows = []
    for found in measured:
        beside = (baselines or {}).get(found.trial.name, base.step_s)
        ratios = [mine / theirs for mine, theirs in zip(found.step_s, beside, strict=True)]
        rows.append(
            Row(
                measured=found,
                ratio=statistics.median(ratios),
                spread=(min(ratios), max(ratios)),
                parity=check_parity(found, base, allowed),
            )
        )
    return Report(rows=rows, refused=refused, precision=precision, setting=setting)


def strategy_call(trial: Trial) -> str:
    """The line of Python that a trial stands for."""
    return f"MCoreStrategy({', '.join(f'{k}={v!r}' for k, v in shown_arguments(trial).items())})"


def shown_arguments(trial: Trial) -> dict[str, Any]:
    """A trial's arguments without those that leave the choice to the strategy."""
    return {
        name: value
        for name, value in trial.arguments.items()
        if value is not None and value != "auto" and value != {}
    }
