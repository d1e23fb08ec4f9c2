"""The tests' GPT with an attention that works under context parallelism on CPU.

The engine's own local attention refuses it, and TransformerEngine's needs GPUs. This one gathers
keys and values from all ranks, puts them in their order and masks by position: slow and simple.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import Tensor, nn

from tests.gpt import SEQ, gpt_chunk, token_dataset


class _Gather(torch.autograd.Function):
    """Joins shards ``[s / cp, b, ...]`` along the sequence, in rank order; gradients are summed."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, mine.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        ranks = dist.get_world_size(ctx.group)
        return gradient.chunk(ranks)[dist.get_rank(ctx.group)].clone(), None


class GatheringAttention(DotProductAttention):
    """Causal attention over the whole sequence for the queries of this rank."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        whole = copy.copy(config)
        whole.context_parallel_size = 1  # the base class asserts it
        super().__init__(whole, *args, **kwargs)
        self.cp = config.context_parallel_size

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, *args, **kwargs) -> Any:
        size = key.shape[0] // 2  # of a chunk
        chunks = torch.arange(2 * size * self.cp).view(2 * self.cp, size)
        held = [torch.cat([chunks[r], chunks[-1 - r]]) for r in range(self.cp)]
        group = parallel_state.get_context_parallel_group()
        if self.cp > 1:
            order = torch.argsort(torch.cat(held))
            key, value = _Gather.apply(key, group)[order], _Gather.apply(value, group)[order]
        mine = held[dist.get_rank(group)]
        hidden = torch.arange(key.shape[0])[None, :] > mine[:, None]
        return super().forward(query, key, value, hidden[None, None], *args, **kwargs)


def context_spec(experts: int | None = None) -> Any:
    """The engine's local layers around ``GatheringAttention``."""
    spec = get_gpt_layer_local_spec(num_experts=experts)
    spec.submodules.self_attention.submodules.core_attention = GatheringAttention
    return spec


def context_chunk(**fields: Any) -> nn.Module:
    """As ``gpt_chunk``."""
    return gpt_chunk(layer_spec=context_spec(fields.get("experts")), **fields)


def masked_dataset(samples: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Tokens, labels and a loss mask ``[s]`` that is uneven between samples and within them.

    Every fourth sample has no token that counts in the first chunk of four, and one in eight none
    at all.
    """
    generator = torch.Generator().manual_seed(5)
    rows = []
    for index, (tokens, labels) in enumerate(token_dataset(samples)):
        kept = torch.rand(SEQ, generator=generator) < torch.rand(1, generator=generator)
        if index % 4 == 1:
            kept[: SEQ // 4] = False
        if index % 8 == 2:
            kept[:] = False
        rows.append((tokens, labels, kept.float()))
    return rows


def token_mean(losses: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Mean of ``losses`` ``[b, s]`` over the tokens that count, and their number."""
    count = mask.sum()
    return (losses.float() * mask).sum() / count.clamp(min=1), count


def whole_batch(samples: Sequence[tuple[Tensor, ...]]) -> list[Tensor]:
    """Samples stacked into ``[b, s]`` columns."""
    return [torch.stack(column) for column in zip(*samples, strict=True)]
