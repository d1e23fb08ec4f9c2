"""Records one window of training steps without disturbing it."""

from __future__ import annotations

import dataclasses
import resource
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from typing_extensions import override

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["Recorder", "Window"]


@dataclass(frozen=True, kw_only=True)
class Window:
    """What one fit of a trial showed, the same on every rank."""

    step_s: float
    """Seconds per optimizer step, of the slowest rank."""
    losses: tuple[float, ...]
    """Loss of every batch, warm-up included."""
    grad_norms: tuple[float, ...]
    """Gradient norm of every optimizer step, warm-up included."""
    peak_bytes: int
    """Memory of the fullest rank."""
    switches: Mapping[str, str]
    """Effective value of each switch."""
    exposed_ms: Mapping[str, float] = field(default_factory=dict)
    """Communication per step that no computation hid, by group, where it was profiled."""


class Recorder(Callback):
    """Times ``steps`` optimizer steps after ``warmup``, and keeps losses and gradient norms.

    The device is waited for at both ends of the window and never inside it, so that work of one
    step may overlap the next as in real training. Losses stay on the device until the end.

    Args:
        warmup: Optimizer steps before the window; the engine overlaps nothing in the first one.
        steps: Optimizer steps in the window.
    """

    def __init__(self, warmup: int, steps: int) -> None:
        super().__init__()
        self.warmup, self.steps = warmup, steps
        self.window: Window | None = None
        self._losses: list[Tensor] = []
        self._norms: list[Tensor | float] = []
        self._start_s = self._end_s = 0.0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if pl_module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(pl_module.device)

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if self._end_s:
            return
        loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
        if loss is not None:
            self._losses.append(loss.detach().clone())
        if trainer.global_step == len(self._norms):  # in the middle of an accumulation
            return
        norm = trainer.strategy.step_stats.norm  # type: ignore[attr-defined]
        self._norms.append(float("nan") if norm is None else norm)
        if trainer.global_step == self.warmup:
            self._start_s = _now(pl_module.device)
        elif trainer.global_step == self.warmup + self.steps:
            self._end_s = _now(pl_module.device)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        mine = (self._end_s - self._start_s, _peak_bytes(pl_module.device))
        strategy: Any = trainer.strategy
        gathered: list[Any] = [None] * trainer.world_size
        dist.all_gather_object(gathered, mine, group=strategy.groups.world_cpu)
        self.window = Window(
            step_s=max(seconds for seconds, _ in gathered) / self.steps,
            losses=tuple(float(loss) for loss in self._losses),
            grad_norms=tuple(float(norm) for norm in self._norms),
            peak_bytes=max(peak for _, peak in gathered),
            switches={
                field.name: str(getattr(family, field.name).effective)
                for family in (strategy.switches, strategy.expert_switches)
                for field in dataclasses.fields(family)
            },
        )


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    # The process's own high-water mark: trials of one process share it.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
