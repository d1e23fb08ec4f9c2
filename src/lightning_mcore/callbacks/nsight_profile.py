"""Opens a window for Nsight Systems with ranges for steps, stages, microbatches and buckets.

What enters: steps. What leaves: NVTX ranges between cudaProfilerStart and Stop. Every rank calls
it; none waits for another.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import Callback
from torch.profiler import record_function
from typing_extensions import override

from lightning_mcore._mcore.buckets import bucket_ranges
from lightning_mcore.errors import ConfigurationError
from lightning_mcore.ranges import profiling

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["NsightProfile"]


class NsightProfile(Callback):
    r"""Lets ``nsys`` record a few steps on chosen ranks.

    Run the training under Nsight Systems, on every node or on those of the chosen ranks::

        nsys profile --capture-range=cudaProfilerApi --capture-range-end=stop-shutdown \
            --trace=cuda,nvtx,cublas,cudnn --cuda-graph-trace=node --gpu-metrics-devices=none \
            --force-overwrite=true --output=step-%h-%p python train.py ...

    nsys then records from the start of ``at_step`` for ``window`` steps, and the program goes on
    afterwards. In it, NVTX ranges ``mcore:step``, ``mcore:forward stage=S microbatch=M``,
    ``mcore:backward ...``, the engine's P2P calls (``mcore:forward-recv``, ...), what waits for
    gradients (``mcore:all-grads-sync``), the start of each bucket's collectives
    (``mcore:grad-reduce chunk=0 bucket=3 elements=40.0M``, ``mcore:param-gather ...``; kernels that
    a range launched are in nsys' projection of it onto the GPU) and each torch operator.

    Cost: without nsys, only in the window: one range per operator, some microseconds of host time
    each. Outside the window two comparisons per batch.

    Args:
        at_step: Optimizer steps before the first one recorded.
        window: Optimizer steps to record.
        ranks: Global ranks that open the window; ``None`` for all.

    Raises:
        ConfigurationError: If a number is out of range; at the start of ``fit`` on every rank if
            there is no GPU.
    """

    def __init__(
        self, at_step: int = 10, window: int = 2, *, ranks: list[int] | None = None
    ) -> None:
        super().__init__()
        if at_step < 0 or window < 1:
            raise ConfigurationError(
                f"`at_step` ({at_step}) must be at least 0 and `window` ({window}) at least 1."
            )
        self.at_step = at_step
        self.window = window
        self.ranks = ranks
        self._open: ExitStack | None = None
        self._mark: Any = None
        self._done = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and trainer.strategy.root_device.type != "cuda":
            raise ConfigurationError(
                f"`NsightProfile` needs a GPU, but the Trainer runs on"
                f" {trainer.strategy.root_device.type}; use accelerator='gpu', or TraceExport,"
                " which works on CPU."
            )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._done = self.ranks is not None and trainer.global_rank not in self.ranks

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        due = not self._done and self._open is None and trainer.global_step >= self.at_step
        if due and not profiling():
            self._open = ExitStack()
            torch.cuda.synchronize()
            torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
            self._open.callback(_stop)
            # Turns every profiler range into an NVTX range, the schedule's among them.
            ranges: Any = torch.autograd.profiler.emit_nvtx  # it has no annotations
            self._open.enter_context(ranges())
            if (run := getattr(trainer.strategy, "_model_run", None)) is not None:
                self._open.enter_context(bucket_ranges(run.chunks, record_function))
        if self._open is not None:
            self._mark = record_function("mcore:step")
            self._mark.__enter__()

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if self._open is None:
            return
        self._mark.__exit__(None, None, None)
        if trainer.global_step >= self.at_step + self.window:
            self._close()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._close()

    def _close(self) -> None:
        if self._open is not None:
            self._done = True
            self._open.close()
            self._open = None


def _stop() -> None:
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
