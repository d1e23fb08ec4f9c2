"""Collects Python's garbage on all ranks in the same steps instead of whenever each happens to.

What enters: steps. What leaves: nothing. Every rank calls it; none waits for another.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from typing_extensions import override

from lightning_mcore.callbacks._periodic import PeriodicCallback
from lightning_mcore.errors import ConfigurationError

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["GarbageCollection"]


class GarbageCollection(PeriodicCallback):
    """Switches automatic garbage collection off during training, and collects every N steps.

    Python collects when enough objects were made, on each rank at another moment. All ranks of a
    step wait for the one that collects, so with many ranks nearly every step waits. Here all
    collect after the same optimizer steps, before validation, and at the end of training, when the
    setting of before is restored.

    Cost: a collection every ``every_n_steps``, typically 50 to 500 ms for a process with a model;
    memory held by reference cycles is freed that much later. ``generation=1`` is shorter and leaves
    old objects alone.

    Args:
        every_n_steps: Optimizer steps between collections.
        generation: 0, 1 or 2 (everything).

    Raises:
        ConfigurationError: If a value is out of range.
    """

    def __init__(self, every_n_steps: int = 100, *, generation: int = 2) -> None:
        super().__init__(every_n_steps)
        if generation not in (0, 1, 2):
            raise ConfigurationError(
                f"`generation` ({generation}) must be 0, 1 or 2; use 2 to collect everything."
            )
        self.generation = generation
        self._was_on = False

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._was_on = gc.isenabled()
        gc.disable()
        gc.collect()
        super().on_train_start(trainer, pl_module)

    @override
    def _at_step(self, trainer: Trainer, pl_module: LightningModule) -> None:
        gc.collect(self.generation)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.training or trainer.state.fn == "fit":
            gc.collect(self.generation)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restore()

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._restore()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._restore()

    def _restore(self) -> None:
        if self._was_on:
            gc.enable()
            self._was_on = False
            gc.collect()
