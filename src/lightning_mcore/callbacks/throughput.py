"""Logs tokens (or samples) per second and the time of a step from the host's clock.

What enters: the batches of one data-parallel rank. What leaves: rates of the whole job. Every rank
calls it; no rank waits for another.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from typing_extensions import override

from lightning_mcore.batch import tensors_of

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from lightning_mcore.layout import Layout

__all__ = ["Throughput"]


class Throughput(Callback):
    """Logs the job's throughput, averaged over windows of training batches.

    Measured once per window and logged with every batch until the next, on all ranks (the clocks of
    two ranks differ a little, so do their values):

    * ``throughput/tokens_per_s``, or ``throughput/samples_per_s`` for batches without tokens: over
      all data-parallel ranks;
    * ``throughput/step_time_s``: seconds per optimizer step.

    Time spent in validation and between epochs does not count, nor does the first batch of a fit.

    Cost: two reads of the host's clock per batch and a walk over the batch's containers. Nothing is
    synchronised, so the clock reads when the host *issued* a step; over a window this equals the
    time of the device, because the gradient norm of each step is read back before the next.

    Args:
        tokens: Counts the tokens in one batch; ``None`` takes the number of elements of the first
            int32 or int64 tensor with two dims (``[b, s]`` token ids), and counts samples if there
            is none. It must only look at shapes: reading values of a tensor waits for the device.
        window: Training batches per logged value, at least 1.
        prog_bar: Whether the throughput shows in the progress bar.

    Raises:
        ValueError: If ``window`` is less than 1.
    """

    def __init__(
        self,
        tokens: Callable[[Any], int] | None = None,
        *,
        window: int = 10,
        prog_bar: bool = True,
    ) -> None:
        super().__init__()
        if window < 1:
            raise ValueError(f"`window` ({window}) must be at least 1 batch; use 10.")
        self.tokens = tokens
        self.window = window
        self.prog_bar = prog_bar
        self._since: float | None = None
        self._warm = False
        self._latest: dict[str, Tensor] = {}
        self._start_window(step=0)

    def _start_window(self, step: int) -> None:
        self._seconds, self._batches, self._count, self._first_step = 0.0, 0, 0, step

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._since, self._warm, self._latest = None, False, {}

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._since is None and self._warm:
            self._since = time.perf_counter()

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        now = time.perf_counter()
        if self._since is None:  # the first batch of the fit: it allocates and compiles
            self._warm, self._since = True, now
            self._start_window(trainer.global_step)
            return
        self._seconds += now - self._since
        self._since = now
        self._batches += 1
        unit, count = self._count_batch(batch)
        self._count += count
        if self._batches >= self.window:
            self._measure(trainer, unit)
        # Every batch, because the loggers only take what the batch at their own interval logs.
        for name, value in self._latest.items():
            pl_module.log(name, value, prog_bar=self.prog_bar and name.endswith("_per_s"))

    def _measure(self, trainer: Trainer, unit: str) -> None:
        """Turns the window that just ended into the values to log, and starts the next."""
        rate = self._count * _replicas(trainer) / self._seconds
        steps = trainer.global_step - self._first_step
        # Tensors on the host: `log` copies a plain number to the device, which waits for it.
        self._latest = {f"throughput/{unit}_per_s": torch.tensor(rate)}
        if steps:
            self._latest["throughput/step_time_s"] = torch.tensor(self._seconds / steps)
        self._start_window(trainer.global_step)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._since = None

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._since = None

    def _count_batch(self, batch: Any) -> tuple[str, int]:
        if self.tokens is not None:
            return "tokens", self.tokens(batch)
        tensors = list(tensors_of(batch))
        for tensor in tensors:
            if tensor.dim() == 2 and tensor.dtype in (torch.int32, torch.int64):
                return "tokens", tensor.numel()
        return "samples", next((t.shape[0] for t in tensors if t.dim()), 1)


def _replicas(trainer: Trainer) -> int:
    """Ranks that see different data: the layout's, or all of them under another strategy."""
    layout: Layout | None = getattr(trainer.strategy, "layout", None)
    return layout.dp if layout is not None else trainer.world_size
