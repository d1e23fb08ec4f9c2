"""Reads the loss, and the tokens behind it, from what the user's training step returned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_mcore.errors import ConfigurationError

__all__ = ["NUM_TOKENS", "check_tokens_wanted", "loss_of", "tokens_of"]

NUM_TOKENS = "num_tokens"
"""Key of the number of tokens in what a step returns with ``per_token_loss``."""


def loss_of(output: Any) -> Tensor:
    """The loss in what a training step returned.

    Raises:
        ConfigurationError: If there is none, or it is not a scalar.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise ConfigurationError(
            "training_step must return the loss as a tensor, or a dict with key 'loss', for every"
            f" microbatch, but returned {type(output).__name__}; a step cannot be skipped under"
            " this strategy, since other ranks wait for its gradients."
        )
    if loss.numel() != 1:
        raise ConfigurationError(
            f"The loss must be a scalar, but has shape {tuple(loss.shape)}; return its mean."
        )
    return loss


def tokens_of(output: Any) -> Tensor:
    """The number of tokens, 0-dim int32, behind the loss that a step returned.

    Raises:
        ConfigurationError: If there is none, or it is not one number.
    """
    tokens = output.get(NUM_TOKENS) if isinstance(output, Mapping) else None
    if isinstance(tokens, int):
        tokens = torch.tensor(tokens)
    if not isinstance(tokens, Tensor) or tokens.numel() != 1:
        has = type(output).__name__ if tokens is None else repr(tokens)
        raise ConfigurationError(
            f"`per_token_loss` (True) needs steps that return {{'loss': mean loss of the tokens"
            f" that count, 'num_tokens': their number}}, but got {has}; return both, or set"
            " per_token_loss=False."
        )
    # int32, in which the engine sums them up (schedules.py, total_num_tokens).
    return tokens.detach().reshape(()).to(torch.int)


def check_tokens_wanted(output: Any, per_token_loss: bool) -> None:
    """Refuses a step that tells its tokens where they would be ignored."""
    if not per_token_loss and isinstance(output, Mapping) and NUM_TOKENS in output:
        raise ConfigurationError(
            "training_step returned 'num_tokens', but `per_token_loss` (False) weights every"
            " microbatch alike; set MCoreStrategy(per_token_loss=True), or do not return it."
        )
