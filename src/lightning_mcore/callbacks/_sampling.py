"""Profiles a few steps now and then; in between nothing is recorded and no device waited for.

What enters: batches as they begin and end. What leaves: this rank's timeline of the steps sampled.
Every rank of the world calls it with the same batches, and samples the same steps.
"""

from __future__ import annotations

import json
import tempfile
import time
import weakref
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import Callback
from torch.profiler import ProfilerActivity, profile, record_function
from typing_extensions import override

from lightning_mcore._mcore.gloo_ranges import gloo_ranges
from lightning_mcore.callbacks._ranks import group_names, wait_for_all
from lightning_mcore.errors import ConfigurationError
from lightning_mcore.ranges import profiling
from lightning_mcore.timeline import Timeline, timeline_of
from lightning_mcore.timeline.events import MARK

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


@dataclass(frozen=True, slots=True)
class Sample:
    """What one rank recorded of a few steps."""

    timeline: Timeline | None
    """``None`` if it could not be recorded."""
    problem: str | None
    first_step: int
    """Optimizer steps before the first one sampled."""
    steps: int
    cost_s: float
    """Time of this rank that starting and reading the profile took, outside the steps."""
    slowdown: float | None
    """Time of a sampled step over the median of those before; ``None`` if too few were seen."""


class StepSampler:
    """Decides which steps to record, and records them.

    Args:
        every_n_steps: Optimizer steps from one sample to the next; the first comes after as many.
        window: Optimizer steps in a sample.
        first: Where the first sample starts, if not after ``every_n_steps``.
    """

    def __init__(self, every_n_steps: int, window: int, *, first: int | None = None) -> None:
        for name, value in (("every_n_steps", every_n_steps), ("window", window)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigurationError(f"`{name}` ({value!r}) must be an integer of at least 1.")
        if window > every_n_steps:
            raise ConfigurationError(
                f"`window` ({window}) must be at most `every_n_steps` ({every_n_steps}); use"
                f" window={every_n_steps} or less."
            )
        self.every_n_steps = every_n_steps
        self.window = window
        self.first = first
        self._next = every_n_steps
        self._recording: _Recording | None = None
        self._batch_start: float | None = None
        self._usual: list[float] = []

    def begin(self, trainer: Trainer) -> None:
        """Forgets earlier fits; called when training starts."""
        step = trainer.global_step
        self._next = (step // self.every_n_steps + 1) * self.every_n_steps
        if self.first is not None and step <= self.first:
            self._next = self.first
        self._recording, self._usual = None, []

    def batch_starts(self, trainer: Trainer, batch_idx: int) -> None:
        """Starts recording if a sample is due; collective over the world if it is."""
        step = trainer.global_step
        if (
            self._recording is None
            and step >= self._next
            and batch_idx % trainer.accumulate_grad_batches == 0
        ):
            self._recording = _Recording.start(trainer, step, self.window)
            self._next = (step // self.every_n_steps + 1) * self.every_n_steps
        if self._recording is not None:
            self._recording.batch_starts(batch_idx)
        self._batch_start = time.perf_counter()

    def batch_ends(self, trainer: Trainer, batch_idx: int) -> Sample | None:
        """The sample, if this batch was its last; on all ranks at the same batch."""
        took = time.perf_counter() - (self._batch_start or 0.0)
        recording = self._recording
        if recording is None:
            # A dozen is enough for a median, and old ones may come from another kind of batch.
            self._usual = [*self._usual[-11:], took]
            return None
        recording.batch_ends(batch_idx, took)
        if trainer.global_step - recording.first_step < self.window:
            return None
        self._recording = None
        usual = sorted(self._usual)[len(self._usual) // 2] if len(self._usual) > 2 else None
        return recording.sample(trainer, usual)

    def stop(self) -> None:
        """Ends a recording that will not be used."""
        if self._recording is not None:
            self._recording.abandon()
            self._recording = None


class SamplingCallback(Callback):
    """A callback that does something with each sample that its sampler takes.

    Args:
        sampler: Decides which steps to record.
    """

    def __init__(self, sampler: StepSampler) -> None:
        super().__init__()
        self._sampler = sampler

    def _report(self, trainer: Trainer, sample: Sample) -> None:
        """Called on every rank at the end of the same batch; may be collective over the world."""
        raise NotImplementedError

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._sampler.begin(trainer)

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._sampler.batch_starts(trainer, batch_idx)

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        sample = self._sampler.batch_ends(trainer, batch_idx)
        if sample is not None:
            self._report(trainer, sample)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._sampler.stop()

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._sampler.stop()


_RUNNING: weakref.WeakKeyDictionary[Trainer, _Recording] = weakref.WeakKeyDictionary()
"""The recording under way in a Trainer: callbacks that sample the same steps share it."""


@dataclass
class _Recording:
    first_step: int
    window: int
    cost_s: float = 0.0
    problem: str | None = None
    _profile: Any = None
    _exits: ExitStack = field(default_factory=ExitStack)
    _mark: Any = None
    _marked: int | None = None
    _ended: int | None = None
    _batch_times: list[float] = field(default_factory=list)
    _timeline: Timeline | None = None
    _done: bool = False

    @classmethod
    def start(cls, trainer: Trainer, step: int, window: int) -> _Recording:
        running = _RUNNING.get(trainer)
        if running is not None and not running._done:
            if (running.first_step, running.window) == (step, window):
                return running
            return cls(step, window, problem="another callback was sampling other steps")
        recording = cls(step, window)
        if profiling():
            recording.problem = "another profiler was running"
            return recording
        _RUNNING[trainer] = recording
        began = time.perf_counter()
        activities = [ProfilerActivity.CPU]
        if trainer.strategy.root_device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.synchronize()
        else:
            recording._exits.enter_context(gloo_ranges())
        recording._profile = profile(activities=activities, record_shapes=True)
        recording._profile.start()
        # Ranks whose profiler starts late would otherwise show up as communication of the others.
        wait_for_all(trainer)
        recording.cost_s += time.perf_counter() - began
        return recording

    def batch_starts(self, batch_idx: int) -> None:
        if self._profile is not None and self._marked != batch_idx:
            self._marked = batch_idx
            self._mark = record_function(f"{MARK}step")
            self._mark.__enter__()

    def batch_ends(self, batch_idx: int, took: float) -> None:
        if self._mark is not None and self._ended != batch_idx:
            self._ended = batch_idx
            self._batch_times.append(took)
            self._mark.__exit__(None, None, None)
            self._mark = None

    def sample(self, trainer: Trainer, usual: float | None) -> Sample:
        if not self._done:
            self._finish(trainer)
        mean = sum(self._batch_times) / len(self._batch_times) if self._batch_times else None
        return Sample(
            timeline=self._timeline,
            problem=self.problem,
            first_step=self.first_step,
            steps=self.window,
            cost_s=self.cost_s,
            slowdown=mean / usual if usual and mean else None,
        )

    def _finish(self, trainer: Trainer) -> None:
        self._done = True
        if self._profile is None:
            return
        began = time.perf_counter()
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()
        self._exits.close()
        # Collectives follow on all ranks: a rank that cannot read its trace says so in them.
        try:
            self._profile.stop()
            with tempfile.TemporaryDirectory(prefix="lightning-mcore-") as folder:
                path = Path(folder) / "trace.json"
                self._profile.export_chrome_trace(str(path))
                self._timeline = timeline_of(json.loads(path.read_bytes()), group_names(trainer))
        except Exception as error:
            self.problem = f"its trace could not be read: {type(error).__name__}: {error}"
        self._profile = None
        self.cost_s += time.perf_counter() - began

    def abandon(self) -> None:
        self._done = True
        if self._mark is not None:
            self._mark.__exit__(None, None, None)
            self._mark = None
        self._exits.close()
        if self._profile is not None:
            self._profile.stop()
            self._profile = None
