"""The engine's multi-token prediction: where it is, and the losses that it notes.

What enters and leaves are modules and tensors. Nothing here is collective.
"""

from __future__ import annotations

import warnings

from torch import Tensor, nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.transformer.multi_token_prediction import (
        MTPLossLoggingHelper,
        MultiTokenPredictionBlock,
    )

__all__ = ["count_predictions", "find_prediction_blocks", "forget_losses", "take_losses"]


def count_predictions(model: nn.Module) -> int:
    """How many further tokens the chunks within ``model`` predict (``mtp_num_layers``)."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return max((getattr(config, "mtp_num_layers", None) or 0 for config in configs), default=0)


def find_prediction_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks on this rank that predict further tokens: one on the last stage, none before."""
    return [module for module in model.modules() if isinstance(module, MultiTokenPredictionBlock)]


def take_losses() -> Tensor | None:
    """Takes the losses ``[predictions]`` noted on this rank since the last call, and forgets them.

    Sums over microbatches, without ``mtp_loss_scaling_factor``; ``None`` before the first.
    """
    # Called "values" in 0.16.
    tracker = MTPLossLoggingHelper.tracker
    values: Tensor | None = tracker.get("loss_values", tracker.get("values"))
    if values is None:
        return None
    taken = values.clone()
    values.zero_()
    return taken


def forget_losses() -> None:
    """Frees what is noted: tensors as long as the first model of the process predicted tokens."""
    MTPLossLoggingHelper.tracker.clear()
