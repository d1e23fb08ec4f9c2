"""Chunks as the user built them, made ready for the engine."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn

from lightning_mcore._mcore import engine
from lightning_mcore.names import PLAIN_PREFIX
from lightning_mcore.precision import MCorePrecision
from lightning_mcore.stage import Pipeline

__all__ = ["trainable_names", "wrap_chunks"]


def wrap_chunks(
    inner: Sequence[nn.Module],
    pipeline: Pipeline | None,
    precision: MCorePrecision,
) -> tuple[list[nn.Module], Any]:
    """Converts chunks to model precision; returns them with a copy of their config.

    The copy is what the engine's DDP and schedule change, so that the user's config stays as it is.
    """
    config = copy.copy(inner[0].config)
    if pipeline is not None and not pipeline.native:
        return [engine.to_model_precision(chunk, config) for chunk in inner], config
    return [precision.convert_native(chunk) for chunk in inner], config


def trainable_names(chunks: Sequence[nn.Module]) -> dict[int, str]:
    """Names of trainable parameters by id, as their author knows them."""
    return {
        id(param): f"chunk {index}: {name}" if len(chunks) > 1 else name.removeprefix(PLAIN_PREFIX)
        for index, chunk in enumerate(chunks)
        for name, param in chunk.named_parameters()
        if param.requires_grad
    }
