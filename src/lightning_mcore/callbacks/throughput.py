"""Logs tokens (or samples) per second, the time of a step and FLOP/s from the host's clock.

What enters: the batches of one data-parallel rank. What leaves: rates of the whole job. Every rank
calls it; no rank waits for another, but once where FLOPs are counted in the first batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from typing_extensions import override

from lightning_mcore.batch import tensors_of
from lightning_mcore.callbacks._ranks import gather_objects
from lightning_mcore.flops import ModelShape, peak_flops, training_flops

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from lightning_mcore.layout import Layout
    from lightning_mcore.run import ModelRun

__all__ = ["Throughput"]


class Throughput(Callback):
    """Logs the job's throughput, averaged over windows of training batches.

    Measured once per window and logged with every batch until the next, on all ranks (the clocks of
    two ranks differ a little, so do their values):

    * ``throughput/tokens_per_s``, or ``throughput/samples_per_s`` for batches without tokens: over
      all data-parallel ranks;
    * ``throughput/step_time_s``: seconds per optimizer step;
    * ``throughput/tflops_per_device``: model TFLOP/s of each device, and ``throughput/mfu``, their
      share of its peak (0 to 1), where the FLOPs of a batch and the peak are known.

    Time spent in validation and between epochs does not count, nor does the first batch of a fit.

    FLOPs of a Megatron GPT follow from its config, as Megatron-LM counts them: causal attention
    half, active experts only, no recomputation (``lightning_mcore.flops`` has the formula). Of
    another module they are its attribute ``flops_per_batch`` (of one data-parallel rank's batch,
    as Lightning's ThroughputMonitor takes it), or what ``torch.utils.flop_counter`` finds in the
    first batch on all ranks: matrix products, convolutions and attention, the latter in full. Peaks
    are dense tensor-core rates from data sheets (``lightning_mcore.flops`` names them); a device
    that is not listed has no MFU, unless ``peak_tflops`` says its peak.

    Cost: two reads of the host's clock per batch and a walk over the batch's containers; counting
    FLOPs slows the first batch, which is not timed. Nothing is synchronised, so the clock reads
    when the host *issued* a step; over a window this equals the time of the device, because the
    gradient norm of each step is read back before the next.

    Args:
        tokens: Counts the tokens in one batch; ``None`` takes the number of elements of the first
            int32 or int64 tensor with two dims (``[b, s]`` token ids), and counts samples if there
            is none. It must only look at shapes: reading values of a tensor waits for the device.
        window: Training batches per logged value, at least 1.
        prog_bar: Whether the throughput shows in the progress bar.
        flops: Whether to log TFLOP/s and MFU.
        peak_tflops: Peak of one device in TFLOP/s for the precision in use; ``None`` looks it up.

    Raises:
        ValueError: If ``window`` is less than 1.
    """

    def __init__(
        self,
        tokens: Callable[[Any], int] | None = None,
        *,
        window: int = 10,
        prog_bar: bool = True,
        flops: bool = True,
        peak_tflops: float | None = None,
    ) -> None:
        super().__init__()
        if window < 1:
            raise ValueError(f"`window` ({window}) must be at least 1 batch; use 10.")
        self.flops = flops
        self.peak_tflops = peak_tflops
        self._shape: ModelShape | None = None
        self._peak: float | None = None
        self._counter: Any = None
        self._counted: float | None = None
        """FLOPs per token or sample, over all ranks that share it, where they were counted."""
        self.tokens = tokens
        self.window = window
        self.prog_bar = prog_bar
        self._since: float | None = None
        self._warm = False
        self._latest: dict[str, Tensor] = {}
        self._start_window(step=0)

    def _start_window(self, step: int) -> None:
        self._seconds, self._batches, self._count, self._first_step = 0.0, 0, 0, step
        self._flops: float | None = 0.0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._since, self._warm, self._latest = None, False, {}
        self._shape = _shape_of(trainer) if self.flops else None
        self._counted = None
        if self.flops:
            self._peak = (
                self.peak_tflops * 1e12 if self.peak_tflops is not None else _peak_of(trainer)
            )

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._since is None and self._warm:
            self._since = time.perf_counter()
        if self._must_count(pl_module):
            self._counter = FlopCounterMode(display=False)
            self._counter.__enter__()

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
        unit, count = self._count_batch(batch)
        if self._counter is not None:
            self._end_count(trainer, count)
            now = time.perf_counter()
        if self._since is None:  # the first batch of the fit: it allocates and compiles
            self._warm, self._since = True, now
            self._start_window(trainer.global_step)
            return
        self._seconds += now - self._since
        self._since = now
        self._batches += 1
        self._count += count
        flops = self._flops_of(pl_module, batch, count) if self.flops else None
        self._flops = None if flops is None or self._flops is None else self._flops + flops
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
        if self._flops:
            per_device = self._flops * _replicas(trainer) / trainer.world_size / self._seconds
            self._latest["throughput/tflops_per_device"] = torch.tensor(per_device / 1e12)
            if self._peak is not None:
                self._latest["throughput/mfu"] = torch.tensor(per_device / self._peak)
        self._start_window(trainer.global_step)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._since = None

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._since = None

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._leave_counter()

    def _must_count(self, pl_module: LightningModule) -> bool:
        known = self._shape is not None or hasattr(pl_module, "flops_per_batch")
        return self.flops and not self._warm and not known and self._counter is None

    def _leave_counter(self) -> float:
        if self._counter is None:
            return 0.0
        self._counter.__exit__(None, None, None)
        total = self._counter.get_total_flops()
        self._counter = None
        return float(total)

    def _end_count(self, trainer: Trainer, count: int) -> None:
        """Adds up what the first batch took on all ranks; collective over the world, once a fit."""
        total = sum(gather_objects(trainer, self._leave_counter()))
        self._counted = total / (count * _replicas(trainer)) if total else None
        if total:
            rank_zero_info(
                f"Throughput: no FLOP formula for this model; the first batch took {total:.4g} FLOP"
                " on all ranks, as counted by torch.utils.flop_counter."
            )

    def _flops_of(self, pl_module: LightningModule, batch: Any, count: int) -> float | None:
        """FLOPs of one data-parallel rank's batch; ``None`` if they are not known."""
        declared = getattr(pl_module, "flops_per_batch", None)
        if declared is not None:
            return float(declared)
        if self._shape is not None:
            ids = _token_ids(batch)
            if ids is None:
                return None
            return training_flops(self._shape, tokens=ids.numel(), seq_length=ids.shape[1])
        return self._counted * count if self._counted is not None else None

    def _count_batch(self, batch: Any) -> tuple[str, int]:
        if self.tokens is not None:
            return "tokens", self.tokens(batch)
        ids = _token_ids(batch)
        if ids is not None:
            return "tokens", ids.numel()
        return "samples", next((t.shape[0] for t in tensors_of(batch) if t.dim()), 1)


def _token_ids(batch: Any) -> Tensor | None:
    """The first int32 or int64 tensor with two dims, ``[b, s]``."""
    return next(
        (t for t in tensors_of(batch) if t.dim() == 2 and t.dtype in (torch.int32, torch.int64)),
        None,
    )


def _shape_of(trainer: Trainer) -> ModelShape | None:
    """The shape of a Megatron GPT; ``None`` for other models and under another strategy."""
    run: ModelRun | None = getattr(trainer.strategy, "_model_run", None)
    if run is None or run.is_native:
        return None
    vocab_size = getattr(run.inner[0], "vocab_size", None)
    config = getattr(run.inner[0], "config", None)
    return ModelShape.from_config(config, vocab_size) if vocab_size and config is not None else None


def _peak_of(trainer: Trainer) -> float | None:
    """Peak FLOP/s of this rank's device in the Trainer's precision."""
    device = trainer.strategy.root_device
    if device.type != "cuda":
        return None
    precision = str(trainer.precision).split("-")[0]
    if precision == "32":
        precision = "fp32" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    return peak_flops(torch.cuda.get_device_name(device), {"16": "fp16"}.get(precision, precision))


def _replicas(trainer: Trainer) -> int:
    """Ranks that see different data: the layout's, or all of them under another strategy."""
    layout: Layout | None = getattr(trainer.strategy, "layout", None)
    return layout.dp if layout is not None else trainer.world_size
