"""What Lightning can do, but a step that the engine drives cannot."""

from __future__ import annotations

from collections.abc import Sequence

import lightning.pytorch as pl
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import callbacks
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_mcore.errors import ConfigurationError

__all__ = ["check_trainer"]

# WeightAveraging came with Lightning 2.6.
_AVERAGING_CALLBACKS = tuple(
    getattr(callbacks, name)
    for name in ("StochasticWeightAveraging", "WeightAveraging")
    if hasattr(callbacks, name)
)


def check_trainer(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Refuses what Lightning can do but an engine-driven step cannot.

    Raises:
        ConfigurationError: On every rank alike, before process groups exist.
    """
    if not module.automatic_optimization:
        raise ConfigurationError(
            "`automatic_optimization` (False) cannot work here: the engine's schedule runs forward"
            " and backward of all microbatches as one, with one optimizer; use automatic"
            " optimization, or train modules with several optimizers under DDPStrategy."
        )
    if is_overridden("backward", module, pl.LightningModule):
        raise ConfigurationError(
            "`backward` is overridden, but the engine's schedule runs the backward pass of every"
            " microbatch itself; scale or combine losses in training_step instead."
        )
    if is_overridden("optimizer_zero_grad", module, pl.LightningModule):
        rank_zero_warn(
            "`optimizer_zero_grad` is overridden, but the engine clears its gradients before each"
            " step whatever it does; use Trainer(accumulate_grad_batches=...) to keep them over"
            " several batches."
        )
    checkpoint_io = type(trainer.strategy.checkpoint_io)
    if checkpoint_io is not TorchCheckpointIO:
        raise ConfigurationError(
            f"Plugin {checkpoint_io.__name__} would not be asked: checkpoints are directories of"
            " shards, which all ranks write; leave it out (MCoreStrategy(async_save=True) writes"
            " beside training)."
        )
    if getattr(trainer.strategy, "_layer_sync", None) is not None:
        raise ConfigurationError(
            "`sync_batchnorm` (True) is not supported: with pipeline stages, ranks do not run the"
            " same norms at the same time; leave it out, or use norms without batch statistics."
        )
    _check_callbacks(trainer.callbacks)  # type: ignore[attr-defined]


def _check_callbacks(found: Sequence[object]) -> None:
    averaging = [type(c).__name__ for c in found if isinstance(c, _AVERAGING_CALLBACKS)]
    if averaging:
        raise ConfigurationError(
            f"Callbacks {averaging} copy and swap the parameters of a whole module, which is"
            " sharded and lives in the engine's buffers here; remove them, and average checkpoints"
            " afterwards."
        )
    unfreezing = [type(c).__name__ for c in found if isinstance(c, callbacks.BaseFinetuning)]
    if unfreezing:
        raise ConfigurationError(
            f"Callbacks {unfreezing} make parameters trainable during fit, but the engine's"
            " gradient buffers and optimizer are built at its start; train them from the start with"
            " a learning rate of 0, or run a second fit with them unfrozen."
        )
