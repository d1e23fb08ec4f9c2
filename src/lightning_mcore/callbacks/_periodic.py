"""Callbacks that do something every so many optimizer steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_mcore.errors import ConfigurationError

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["PeriodicCallback"]


class PeriodicCallback(Callback):
    """Calls ``_at_step`` once after every ``every_n_steps``-th optimizer step, on every rank.

    Args:
        every_n_steps: Optimizer steps from one call to the next.

    Raises:
        ConfigurationError: If ``every_n_steps`` is less than 1.
    """

    def __init__(self, every_n_steps: int) -> None:
        super().__init__()
        if every_n_steps < 1:
            raise ConfigurationError(f"`every_n_steps` ({every_n_steps}) must be at least 1.")
        self.every_n_steps = every_n_steps
        self._last = -1

    def _at_step(self, trainer: Trainer, pl_module: LightningModule) -> None:
        raise NotImplementedError

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last = trainer.global_step

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        step = trainer.global_step
        # Not again for the batches that only accumulate.
        if step != self._last and step % self.every_n_steps == 0:
            self._last = step
            self._at_step(trainer, pl_module)
