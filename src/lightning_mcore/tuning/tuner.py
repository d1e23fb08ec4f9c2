"""Runs trials on the user's own module, data and machines, and judges them.

Every rank runs the same trials in the same order. Short fits, each with a fresh module that starts
from the same weights and sees the same batches; rounds go through the trials forwards and backwards
in turn, so that a drift of the machine falls on all alike.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import logging
import platform
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_mcore.callbacks import CommTimings
from lightning_mcore.environment.kept import kept_variables
from lightning_mcore.errors import ConfigurationError
from lightning_mcore.strategy import MCoreStrategy
from lightning_mcore.timeline import StepTimes
from lightning_mcore.timeline.summary import summarise
from lightning_mcore.tuning.recorder import Recorder, Window
from lightning_mcore.tuning.trials import Measurement, Refusal, Trial, combine, plan_trials
from lightning_mcore.tuning.verdict import Report, judge
from lightning_mcore.version import package_versions

__all__ = ["MCoreTuner"]

_TRAINER_OURS = (
    "strategy",
    "logger",
    "callbacks",
    "max_steps",
    "max_epochs",
    "max_time",
    "limit_val_batches",
    "enable_checkpointing",
    "default_root_dir",
)
"""Arguments of the Trainer that a tuner sets itself."""
_SEEDS = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")
"""Variables by which Lightning's seeding is inherited."""
_PROFILED = 2
"""Steps of the last round that are profiled, behind its window."""


class MCoreTuner:
    """Tries communication switches on short runs of a job and checks that training stays the same.

    First ``comm="safe"``, each switch that can matter on top of it, the presets and the job as
    configured; then the winners together. Trials leave nothing behind: no checkpoint, no log, and
    the random state as it was.

    Args:
        make_module: Makes the LightningModule; called for every fit, on every rank.
        make_data: Makes the training DataLoader or LightningDataModule; likewise.
        strategy: Arguments of MCoreStrategy: sizes, ``micro_batch_size``, ``init_from`` and so on.
        trainer: Arguments of the Trainer, such as ``accelerator``, ``devices``, ``num_nodes``,
            ``precision`` and ``gradient_clip_val``. Loggers, callbacks and limits are left out.
        steps: Optimizer steps in a window, at least 1.
        warmup: Optimizer steps before a window; at least 2, since the engine overlaps nothing in
            the first one.
        rounds: Windows per trial, at least 2: the baseline's repeats give the tolerance.
        extra: Further trials by name: arguments on top of ``comm="safe"``.
        seed: Of weights and data order.
        only: Names of the trials to run beside the baseline; all by default.

    Raises:
        ConfigurationError: If a number is too small, ``trainer`` sets what the tuner sets itself,
            or a trial is unknown.
    """

    def __init__(
        self,
        make_module: Callable[[], pl.LightningModule],
        make_data: Callable[[], Any],
        *,
        strategy: Mapping[str, Any] | None = None,
        trainer: Mapping[str, Any] | None = None,
        steps: int = 10,
        warmup: int = 3,
        rounds: int = 3,
        extra: Mapping[str, Mapping[str, Any]] | None = None,
        only: Sequence[str] | None = None,
        seed: int = 1,
    ) -> None:
        counts = {"steps": (steps, 1), "warmup": (warmup, 2), "rounds": (rounds, 2)}
        for name, (value, least) in counts.items():
            if value < least:
                raise ConfigurationError(
                    f"`{name}` ({value}) must be at least {least}; use {name}={least} or more."
                )
        self._trainer = dict(trainer or {})
        double = sorted(set(self._trainer) & set(_TRAINER_OURS))
        if double:
            raise ConfigurationError(
                f"`trainer` sets {double}, which the tuner sets itself; leave them out."
            )
        self._make_module, self._make_data = make_module, make_data
        self._steps, self._warmup, self._rounds, self._seed = steps, warmup, rounds, seed
        self._trials = plan_trials(
            strategy or {}, inspect.signature(MCoreStrategy).parameters, extra
        )
        if only is not None:
            names = [trial.name for trial in self._trials]
            unknown = sorted(set(only) - set(names))
            if unknown:
                raise ConfigurationError(
                    f"`only` names the unknown trials {unknown}; use any of {names}."
                )
            self._trials = [t for t in self._trials if t is self._trials[0] or t.name in only]

    def run(self) -> Report:
        """Runs all trials; every rank calls it and gets the same report.

        Raises:
            ConfigurationError: If even the baseline cannot run.
        """
        with (
            tempfile.TemporaryDirectory() as folder,
            isolate_rng(),
            kept_variables(_SEEDS),
            _quiet(),
        ):
            start = self._save_start(Path(folder))
            windows: dict[str, list[Window]] = {}
            beside: dict[str, list[float]] = {}
            refused: list[Refusal] = []
            self._measure(self._trials, start, windows, refused)
            measured = self._measurements(self._trials, windows)
            first = judge(measured, refused, precision=self._precision, setting={})
            winners = [row.measured.trial for row in first.winners]
            together = combine(self._trials[0], winners)
            if together is not None:
                again = dataclasses.replace(self._trials[0], name="safe, beside the winners")
                later: dict[str, list[Window]] = {}
                self._measure([again, together], start, later, refused)
                if together.name in later:
                    measured += self._measurements([together], later)
                    beside[together.name] = [w.step_s for w in later[again.name]]
        return judge(
            measured,
            refused,
            precision=self._precision,
            setting=self._setting(),
            baselines=beside,
        )

    @property
    def _precision(self) -> str:
        return str(self._trainer.get("precision") or "32-true")

    def _measure(
        self,
        trials: Sequence[Trial],
        start: Path,
        windows: dict[str, list[Window]],
        refused: list[Refusal],
    ) -> None:
        for index in range(self._rounds):
            for trial in trials if index % 2 == 0 else trials[::-1]:
                if any(refusal.trial is trial for refusal in refused):
                    continue
                try:
                    window = self._fit(trial, start, profiled=index == self._rounds - 1)
                except ConfigurationError as error:
                    if trial is self._trials[0]:
                        raise
                    refused.append(Refusal(trial=trial, reason=str(error)))
                    continue
                windows.setdefault(trial.name, []).append(window)
                _say(
                    f"round {index + 1}/{self._rounds}  {trial.name}: {window.step_s * 1e3:.1f} ms"
                )

    def _measurements(
        self, trials: Sequence[Trial], windows: Mapping[str, Sequence[Window]]
    ) -> list[Measurement]:
        return [
            Measurement(
                trial=trial,
                step_s=[window.step_s for window in windows[trial.name]],
                losses=[window.losses for window in windows[trial.name]],
                grad_norms=[window.grad_norms for window in windows[trial.name]],
                peak_bytes=max(window.peak_bytes for window in windows[trial.name]),
                exposed_ms=windows[trial.name][-1].exposed_ms,
                switches=windows[trial.name][0].switches,
            )
            for trial in trials
            if trial.name in windows
        ]

    def _save_start(self, folder: Path) -> Path:
        """Saves the weights that every trial starts from, whatever its layout of chunks."""
        trainer = self._make_trainer(self._trials[0].arguments, [], max_steps=0)
        trainer.fit(self._make_seeded(), self._make_data())
        # Rank 0's temporary folder is the one that all ranks use.
        path = Path(trainer.strategy.broadcast(str(folder / "start.ckpt")))
        trainer.save_checkpoint(path, weights_only=True)
        return path

    def _fit(self, trial: Trial, start: Path, *, profiled: bool) -> Window:
        steps = self._warmup + self._steps
        recorder = Recorder(self._warmup, self._steps)
        timings = CommTimings(every_n_steps=steps, window=_PROFILED, picture=False)
        trainer = self._make_trainer(
            {**trial.arguments, "init_from": start},
            [recorder, timings] if profiled else [recorder],
            max_steps=steps + (_PROFILED if profiled else 0),
        )
        trainer.fit(self._make_seeded(), self._make_data())
        assert recorder.window is not None
        return dataclasses.replace(recorder.window, exposed_ms=_exposed(timings.latest))

    def _make_seeded(self) -> pl.LightningModule:
        pl.seed_everything(self._seed, workers=True, verbose=False)
        return self._make_module()

    def _make_trainer(
        self, arguments: Mapping[str, Any], callbacks: list[pl.Callback], *, max_steps: int
    ) -> pl.Trainer:
        quiet = {
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
        }
        return pl.Trainer(
            **{**self._trainer, **quiet},
            strategy=MCoreStrategy(**copy.deepcopy(dict(arguments))),
            callbacks=callbacks,
            max_steps=max_steps,
            max_epochs=-1,
            limit_val_batches=0,
            logger=False,
            enable_checkpointing=False,
        )

    def _setting(self) -> dict[str, Any]:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
        return {
            **package_versions(),
            "device": device or platform.machine(),
            "precision": self._precision,
            "steps per window": self._steps,
            "steps of warm-up": self._warmup,
            "rounds": self._rounds,
        }


def _exposed(times: Sequence[StepTimes]) -> dict[str, float]:
    """Exposed communication by group of the rank with the median compute time, ms per step."""
    if not times:
        return {}
    groups = times[summarise(times).median].groups
    return {name: group.exposed_share_us / 1e3 for name, group in groups.items()}


@rank_zero_only
def _say(text: str) -> None:
    print(text, flush=True)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps every one of many Trainers from introducing itself."""
    names = ("lightning.pytorch", "lightning.fabric", "lightning_utilities")
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
