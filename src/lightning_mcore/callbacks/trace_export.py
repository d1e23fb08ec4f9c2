"""Writes one trace of all ranks, with a row per group, for Perfetto.

What enters: a profile of a few steps on every rank. What leaves: a file, written by rank zero.
Every rank calls it.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_mcore.callbacks._ranks import describe_rank, gather_objects
from lightning_mcore.callbacks._sampling import Sample, SamplingCallback, StepSampler
from lightning_mcore.errors import ConfigurationError
from lightning_mcore.timeline import merged_trace

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["TraceExport"]

_NEVER_AGAIN = 2**62


class TraceExport(SamplingCallback):
    """Records ``window`` steps once and writes ``trace-step-N.json.gz``.

    Open it at https://ui.perfetto.dev: each rank is a process, with the schedule's passes, compute,
    copies, and each group's communication as rows. ``lightning-mcore timeline`` draws it as a
    pipeline diagram. Ranks are aligned by their hosts' clocks.

    Cost: one sample as of ``CommTimings`` (they share it if they sample the same steps), sending
    every rank's kernels to rank zero (about 20 bytes packed per kernel) and writing them. Nothing
    in other steps but two comparisons and two reads of the host's clock.

    Args:
        at_step: Optimizer steps before the first one recorded; leave some for warming up. A run
            that resumes later than that records nothing.
        window: Optimizer steps to record.
        dirpath: Where to write; ``None`` is the Trainer's ``default_root_dir``.

    Raises:
        ConfigurationError: If a number is out of range.
    """

    def __init__(
        self, at_step: int = 10, window: int = 1, *, dirpath: str | Path | None = None
    ) -> None:
        if at_step < 0:
            raise ConfigurationError(f"`at_step` ({at_step}) must be at least 0; use 10.")
        super().__init__(StepSampler(_NEVER_AGAIN, window, first=at_step))
        self.dirpath = dirpath
        self.path: Path | None = None
        """Of the file, on every rank, once it is written."""

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self.path = None

    @override
    def _report(self, trainer: Trainer, sample: Sample) -> None:
        of_ranks = gather_objects(trainer, (sample.timeline, sample.problem))
        folder = Path(trainer.default_root_dir if self.dirpath is None else self.dirpath)
        self.path = folder / f"trace-step-{sample.first_step}.json.gz"
        missing = [rank for rank, (timeline, _) in enumerate(of_ranks) if timeline is None]
        if missing:
            rank_zero_warn(
                f"TraceExport wrote nothing: on {describe_rank(trainer, missing[0])},"
                f" {of_ranks[missing[0]][1]}."
            )
            return
        if trainer.is_global_zero:
            folder.mkdir(parents=True, exist_ok=True)
            titles = {rank: describe_rank(trainer, rank) for rank in range(len(of_ranks))}
            trace = merged_trace([timeline for timeline, _ in of_ranks], titles)
            self.path.write_bytes(gzip.compress(json.dumps(trace).encode()))
        rank_zero_info(
            f"TraceExport wrote {self.path}: open it at https://ui.perfetto.dev, or draw it with"
            f" lightning-mcore timeline {self.path} -o pipeline.svg"
        )
