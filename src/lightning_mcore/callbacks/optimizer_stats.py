"""Logs what the optimizer step reported: gradient norm, and whether it was skipped.

What enters: ``strategy.step_stats``. What leaves: two logged values. Every rank calls it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_mcore.errors import ConfigurationError

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["OptimizerStats"]


class OptimizerStats(Callback):
    """Logs ``optimizer/grad_norm`` and ``optimizer/skipped`` after every optimizer step.

    ``optimizer/grad_norm`` is the global 2-norm before clipping, over all parameters of the model
    on whichever rank they live. It is left out where the step computed none. ``optimizer/skipped``
    is 1 where a step was dropped because fp16 gradients overflowed or, with ``nonfinite="skip"``,
    held NaN or Inf, else 0; ``optimizer/skipped_steps`` counts those of the run.

    Cost: nothing is computed, communicated or read back from a device; the norm stays where the
    engine's step left it until a logger reads it.

    Args:
        prog_bar: Whether the gradient norm shows in the progress bar.

    Raises:
        ConfigurationError: At the start of ``fit`` if the Trainer's strategy reports no
            statistics, on every rank.
    """

    def __init__(self, *, prog_bar: bool = False) -> None:
        super().__init__()
        self.prog_bar = prog_bar

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not hasattr(trainer.strategy, "step_stats"):
            raise ConfigurationError(
                "`OptimizerStats` needs a strategy with `step_stats`, but the Trainer runs"
                f" {type(trainer.strategy).__name__}; use strategy=MCoreStrategy(...) or leave the"
                " callback out."
            )

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        stats = trainer.strategy.step_stats  # type: ignore[attr-defined]
        if stats is None:  # no optimizer step yet: the first batches of an accumulation
            return
        # Tensors on the host: `log` copies a plain number to the device, which waits for it.
        pl_module.log("optimizer/skipped", torch.tensor(float(stats.skipped)))
        pl_module.log("optimizer/skipped_steps", torch.tensor(float(stats.skipped_steps)))
        norm = stats.norm
        if norm is not None:
            if not isinstance(norm, torch.Tensor):
                norm = torch.tensor(float(norm))
            pl_module.log("optimizer/grad_norm", norm, prog_bar=self.prog_bar)
