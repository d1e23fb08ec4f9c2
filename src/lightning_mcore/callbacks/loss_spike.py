"""Finds steps whose loss stands out from those before it.

What enters: the loss that each training step returned, which every rank holds alike. What leaves: a
warning per spike, a count in the log, and optionally the end of training. Every rank calls it.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_mcore.errors import ConfigurationError

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["LossSpike"]

_SIGMA_OF_MAD = 1.4826
"""Standard deviation of a normal distribution in units of its median absolute deviation."""


class LossSpike(Callback):
    """Warns of losses far above the running median, naming their steps.

    A loss is a spike if it exceeds the median of the last ``window`` losses by more than ``sigmas``
    times their spread (1.4826 times the median absolute deviation), or if it is not finite. Spikes
    do not enter the window. ``loss_spikes`` is logged, their number so far.

    Losses stay on the device until ``every_n_steps`` of them are read at once, so a spike is told
    of up to that many steps late, with its own step.

    Args:
        window: Steps behind the median.
        sigmas: Distance from the median, in units of the spread.
        min_steps: Steps before anything counts as a spike.
        every_n_steps: Steps between two looks. ``None``: the Trainer's ``log_every_n_steps``.
        stop: Whether to end training, on all ranks, when a spike is found.

    Raises:
        ConfigurationError: If a number is out of range.
    """

    def __init__(
        self,
        *,
        window: int = 200,
        sigmas: float = 10.0,
        min_steps: int = 50,
        every_n_steps: int | None = None,
        stop: bool = False,
    ) -> None:
        super().__init__()
        if not 2 <= min_steps <= window:
            raise ConfigurationError(
                f"`min_steps` ({min_steps}) must be at least 2 and at most `window` ({window}); use"
                f" min_steps={min(50, max(2, window))}."
            )
        if not sigmas > 0.0 or (every_n_steps is not None and every_n_steps < 1):
            raise ConfigurationError(
                f"`sigmas` ({sigmas}) must be positive and `every_n_steps` ({every_n_steps}) at"
                " least 1 or None; leave them out for the defaults."
            )
        self.window, self.sigmas, self.min_steps = window, sigmas, min_steps
        self.every_n_steps = every_n_steps
        self.stop = stop
        self.spikes: list[tuple[int, float, float]] = []
        """Step (counted from 1), loss and median of each spike."""
        self._recent: deque[float] = deque(maxlen=window)
        self._waiting: list[tuple[int, torch.Tensor]] = []

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, torch.Tensor):
            self._waiting.append((trainer.global_step, loss.detach()))
        every = self.every_n_steps or max(1, trainer.log_every_n_steps)  # type: ignore[attr-defined]
        if len(self._waiting) >= every:
            self._look(trainer)
        pl_module.log("loss_spikes", torch.tensor(float(len(self.spikes))))

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._look(trainer)

    def _look(self, trainer: Trainer) -> None:
        if not self._waiting:
            return
        steps, losses = zip(*self._waiting, strict=True)
        self._waiting = []
        for step, loss in zip(steps, torch.stack(losses).tolist(), strict=True):
            middle = self._judge(loss)
            if middle is None:
                self._recent.append(loss)
                continue
            self.spikes.append((step, loss, middle))
            rank_zero_warn(
                f"The loss of step {step} is {loss:.6g}, against a median of {middle:.6g} over the"
                f" last {len(self._recent)} steps."
            )
            if self.stop:
                trainer.should_stop = True

    def _judge(self, loss: float) -> float | None:
        """The median that ``loss`` stands out from; ``None`` if it does not."""
        finite = loss - loss == 0.0
        if len(self._recent) < self.min_steps:
            return None if finite else (median(self._recent) if self._recent else float("nan"))
        middle = median(self._recent)
        spread = _SIGMA_OF_MAD * median(abs(value - middle) for value in self._recent)
        return middle if not finite or loss - middle > self.sigmas * spread else None

    @override
    def state_dict(self) -> dict[str, Any]:
        recent = [*self._recent]
        if self._waiting:
            recent += torch.stack([loss for _, loss in self._waiting]).tolist()
        return {"recent": recent[-self.window :], "spikes": list(self.spikes)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._recent = deque(state_dict["recent"], maxlen=self.window)
        self.spikes = [(step, loss, middle) for step, loss, middle in state_dict["spikes"]]
