"""Callbacks that count within the optimizer steps that are logged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_mcore.errors import ConfigurationError

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["LoggedStepCallback"]


class LoggedStepCallback(Callback):
    """Calls ``_begin_step`` and ``_end_step`` around the optimizer steps that are logged.

    A step may accumulate over several batches. Hooks in ``_hooks`` are removed at the end of
    ``fit``, however it comes.

    Args:
        every_n_steps: Optimizer steps between two logged ones; ``None`` takes the Trainer's
            ``log_every_n_steps``.

    Raises:
        ConfigurationError: If ``every_n_steps`` is less than 1; at the start of ``fit``, on every
            rank, if the strategy is another one.
    """

    def __init__(self, every_n_steps: int | None) -> None:
        super().__init__()
        if every_n_steps is not None and every_n_steps < 1:
            raise ConfigurationError(
                f"`every_n_steps` ({every_n_steps}) must be at least 1; use every_n_steps=50."
            )
        self.every_n_steps = every_n_steps
        self._step: int | None = None
        """The optimizer step that is being counted."""
        self._hooks: list[Any] = []

    @property
    def _is_counting(self) -> bool:
        """Not without gradients: evaluation, or the first of two runs of a recomputed layer."""
        return self._step is not None and torch.is_grad_enabled()

    def _begin_step(self) -> None:
        raise NotImplementedError

    def _end_step(self, trainer: Trainer, pl_module: LightningModule) -> None:
        raise NotImplementedError

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not hasattr(trainer.strategy, "groups"):
            raise ConfigurationError(
                f"`{type(self).__name__}` needs the strategy's process groups, but the Trainer runs"
                f" {type(trainer.strategy).__name__}; use strategy=MCoreStrategy(...) or leave the"
                " callback out."
            )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step = None

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        every = self.every_n_steps or max(trainer.log_every_n_steps, 1)  # type: ignore[attr-defined]
        if (trainer.global_step + 1) % every:
            self._step = None
        elif self._step != trainer.global_step:  # the first batch of its accumulation
            self._step = trainer.global_step
            self._begin_step()

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if self._step is not None and trainer.global_step != self._step:
            self._step = None
            self._end_step(trainer, pl_module)

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._remove_hooks()

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._remove_hooks()
