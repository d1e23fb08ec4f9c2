"""Finds ranks that compute longer than others with the same work.

What enters: a profile of a few steps on every rank. What leaves: scalars, and a warning that names
the rank. Every rank calls it; all log the same values.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_mcore.callbacks._ranks import (
    describe_rank,
    gather_objects,
    layout_of,
    layout_of_rank,
    log_now,
)
from lightning_mcore.callbacks._sampling import Sample, SamplingCallback, StepSampler
from lightning_mcore.errors import ConfigurationError
from lightning_mcore.timeline import analyse

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["Stragglers", "slow_ranks"]


class Stragglers(SamplingCallback):
    """Compares the ranks' compute time, and names those that are slow again and again.

    All ranks of a step end together, so a slow one does not show in their step times, but in how
    long it computes while the others wait for it. A rank is compared with the median of those that
    hold the same pipeline stage, since stages differ by design. One that takes ``threshold`` times
    as long in ``patience`` samples running is named in a warning, with its coordinates.

    Logs ``stragglers/slowest_ratio`` (largest ratio to the median of its peers) and
    ``stragglers/slowest_rank``, once per sample, the same on all ranks.

    Cost: that of a sample of ``CommTimings``, and nothing between samples; callbacks that sample
    the same steps share one profile.

    Args:
        every_n_steps: Optimizer steps between samples.
        window: Optimizer steps in a sample.
        threshold: Ratio above which a rank counts as slow; more than 1.
        patience: Samples running after which it is named; at least 1.

    Raises:
        ConfigurationError: If a value is out of range.
    """

    def __init__(
        self,
        every_n_steps: int = 500,
        window: int = 2,
        *,
        threshold: float = 1.15,
        patience: int = 2,
    ) -> None:
        if threshold <= 1.0:
            raise ConfigurationError(
                f"`threshold` ({threshold}) must be above 1: ranks always differ a little; use"
                " 1.15."
            )
        if patience < 1:
            raise ConfigurationError(f"`patience` ({patience}) must be at least 1.")
        super().__init__(StepSampler(every_n_steps, window))
        self.threshold = threshold
        self.patience = patience
        self._slow_for: dict[int, int] = {}

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._slow_for = {}

    @override
    def _report(self, trainer: Trainer, sample: Sample) -> None:
        mine = None
        if sample.timeline is not None and sample.timeline.intervals:
            mine = analyse(sample.timeline, steps=sample.steps).compute_us
        compute_us = gather_objects(trainer, mine)
        if any(value is None for value in compute_us):
            return  # on all ranks
        ratios = slow_ranks(compute_us, _stages(trainer))
        slowest = max(ratios, key=lambda rank: ratios[rank])
        log_now(
            trainer,
            {
                "stragglers/slowest_ratio": ratios[slowest],
                "stragglers/slowest_rank": float(slowest),
            },
        )
        self._slow_for = {
            rank: self._slow_for.get(rank, 0) + 1
            for rank, ratio in ratios.items()
            if ratio >= self.threshold
        }
        for rank, samples in self._slow_for.items():
            if samples == self.patience:
                rank_zero_warn(
                    f"Stragglers: {describe_rank(trainer, rank)} computed"
                    f" {ratios[rank]:.2f} times as long as the median of the ranks with the same"
                    f" work, in {samples} samples running up to step {sample.first_step}"
                    f" ({compute_us[rank] / 1e3:.1f} ms per step); look at its device's clocks and"
                    " temperature, and at what else runs on its host."
                )


def slow_ranks(compute_us: Sequence[float], stages: Mapping[int, int]) -> dict[int, float]:
    """Ratio of each rank's compute time to the median of the ranks with the same stage.

    Args:
        compute_us: By rank.
        stages: Pipeline position by rank.
    """
    medians: dict[int, float] = {}
    for stage in set(stages.values()):
        peers = [value for rank, value in enumerate(compute_us) if stages[rank] == stage]
        # Of two, the faster one: a mean of both would hide half of the difference.
        medians[stage] = statistics.median_low(peers)
    return {
        rank: value / medians[stages[rank]] if medians[stages[rank]] else 1.0
        for rank, value in enumerate(compute_us)
    }


def _stages(trainer: Trainer) -> dict[int, int]:
    layout = layout_of(trainer)
    if layout is None:
        return dict.fromkeys(range(trainer.world_size), 0)
    return {rank: layout_of_rank(layout, rank).pp_rank for rank in range(layout.world_size)}
