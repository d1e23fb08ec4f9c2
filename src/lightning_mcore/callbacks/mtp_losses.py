"""Logs the losses of multi-token prediction.

What enters: losses that the engine notes on the last stage. What leaves: their means over the whole
job, the same on every rank. Every rank calls it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_mcore._mcore.mtp import count_predictions, find_prediction_blocks, take_losses
from lightning_mcore.callbacks._logged_step import LoggedStepCallback
from lightning_mcore.errors import ConfigurationError

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["MTPLosses"]


class MTPLosses(LoggedStepCallback):
    """Logs ``mtp/loss_1``, ``mtp/loss_2``... of models with ``mtp_num_layers``.

    ``mtp/loss_k`` is the mean cross entropy of the token that lies ``k`` behind the next one, over
    all microbatches and data-parallel ranks of an optimizer step, without
    ``mtp_loss_scaling_factor``. The engine adds these losses to the gradient only: what
    ``training_step`` returns and logs is the loss of the next token.

    Cost: in a step that is logged one all-reduce over the world of ``2 x mtp_num_layers`` numbers,
    for which the host does not wait.

    Args:
        every_n_steps: Optimizer steps between two logged ones; ``None`` takes the Trainer's
            ``log_every_n_steps``.

    Raises:
        ConfigurationError: At the start of ``fit``, on every rank, if the strategy is another one
            or the model predicts one token only.
    """

    def __init__(self, *, every_n_steps: int | None = None) -> None:
        super().__init__(every_n_steps)
        self._calls = 0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._predictions = count_predictions(pl_module)
        if self._predictions == 0:
            raise ConfigurationError(
                "`MTPLosses` needs a model that predicts several tokens, and `mtp_num_layers` of"
                " its config is not set; leave the callback out."
            )
        for block in find_prediction_blocks(pl_module):
            self._hooks.append(block.register_forward_hook(self._count))

    def _count(self, *_: Any) -> None:
        self._calls += self._is_counting

    @override
    def _begin_step(self) -> None:
        self._calls = 0
        take_losses()

    @override
    def _end_step(self, trainer: Trainer, pl_module: LightningModule) -> None:
        means = self._reduce(pl_module.device)
        for index, mean in enumerate(means.unbind(), start=1):
            pl_module.log(f"mtp/loss_{index}", mean)

    def _reduce(self, device: torch.device) -> Tensor:
        """Means ``[predictions]`` over the ranks that predict. Collective over the world."""
        table = torch.zeros(2, self._predictions, device=device)
        losses = take_losses()
        if losses is not None and self._calls:
            table[0], table[1] = losses / self._calls, 1.0
        if dist.get_world_size() > 1:
            dist.all_reduce(table)
        return table[0] / table[1]
