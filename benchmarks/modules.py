"""LightningModules of the GPU benchmarks, and the strategies of Lightning's own that train them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from models import Block, Model, TorchGPT, call_gpt, mcore_chunk
from torch import nn

from gpt import GPT, FusedGPT

NONE: Mapping[str, Any] = MappingProxyType({})


def engine_module(model: Model, options: Mapping[str, Any] = NONE) -> GPT:
    """The engine's GPT; ``options`` are fields of its TransformerConfig."""
    return GPT(
        model,
        lambda trainer, factory: trainer.strategy.build(factory),
        chunk=partial(mcore_chunk, options=options),
        call=call_gpt,
    )


def torch_module(model: Model, compiled: str = "blocks") -> FusedGPT:
    """Its plain torch twin; what of it is compiled is one of ``models.COMPILE``."""
    return FusedGPT(
        model,
        lambda trainer, factory: _plain(model, trainer.strategy.root_device, compiled),
        call=lambda plain, tokens, labels: plain(tokens, labels),
    )


def _plain(model: Model, device: torch.device, compiled: str) -> nn.Module:
    with device:
        plain = TorchGPT(model)
    if device.type != "cpu":
        plain.compile_parts(compiled)
    return plain


def ddp_strategy(settings: Mapping[str, Any] = NONE) -> DDPStrategy:
    """Lightning's DDP as one would tune it; ``settings`` win."""
    return DDPStrategy(**{"gradient_as_bucket_view": True, **settings})


def fsdp_strategy(precision: str, settings: Mapping[str, Any] = NONE) -> FSDPStrategy:
    """Lightning's FSDP, a unit per block; ``settings`` win."""
    from torch.distributed.fsdp import MixedPrecision

    # fp32 gradients as everywhere here; Lightning's own choice for bf16-mixed reduces in bf16.
    mixed = MixedPrecision(torch.bfloat16, torch.float32, torch.float32)
    wanted = mixed if precision == "bf16-mixed" else None
    return FSDPStrategy(**{"auto_wrap_policy": {Block}, "mixed_precision": wanted, **settings})
