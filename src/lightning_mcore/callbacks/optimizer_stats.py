"""Logs what the optimizer step reported: gradient norm, zeros, loss scale, skipped steps.

What enters: ``strategy.step_stats``. What leaves: logged values. Every rank calls it.
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
    """Logs figures of every optimizer step.

    * ``optimizer/grad_norm``: global 2-norm before clipping, over all parameters of the model on
      whichever rank they live; left out where the step computed none.
    * ``optimizer/num_zeros``: zero entries of the gradient, if the engine counts them:
      ``MCoreStrategy(optimizer={"log_num_zeros_in_grad": True})``, which costs a pass over the
      gradients, a collective and a wait for the device in each step.
    * ``optimizer/loss_scale``: factor on the loss in fp16.
    * ``optimizer/skipped``: 1 where a step was dropped because fp16 gradients overflowed or, with
      ``nonfinite="skip"``, held NaN or Inf, else 0;
      ``optimizer/skipped_steps``: how many were since training began, resumed runs included.

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
        self._skipped_steps = 0
        self._last_step: object = None

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
        if stats is not self._last_step:  # not again for the batches that only accumulate
            self._last_step = stats
            self._skipped_steps += int(stats.skipped)
        values = {
            "optimizer/skipped": float(stats.skipped),
            "optimizer/skipped_steps": float(self._skipped_steps),
            "optimizer/num_zeros": stats.num_zeros,
            "optimizer/loss_scale": stats.loss_scale,
        }
        # Tensors on the host: `log` copies a plain number to the device, which waits for it.
        for name, value in values.items():
            if value is not None:
                pl_module.log(name, _tensor(value))
        if stats.norm is not None:
            pl_module.log("optimizer/grad_norm", _tensor(stats.norm), prog_bar=self.prog_bar)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"skipped_steps": self._skipped_steps}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._skipped_steps = state_dict["skipped_steps"]


def _tensor(value: float | torch.Tensor) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.tensor(float(value))
