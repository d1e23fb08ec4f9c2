"""The GPT, its data and its LightningModule that the benchmarks train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

LEARNING_RATE = 1e-4
WEIGHT_DECAY = 0.01
CLIP_NORM = 1.0


@dataclass(frozen=True)
class Size:
    """Dimensions of a model and of its batch."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    seq: int
    batch: int
    """Samples per data-parallel rank and step."""
    micro_batch: int
    """Samples per microbatch where there is a pipeline."""


SIZES = {
    "tiny": Size(layers=4, hidden=32, heads=4, vocab=64, seq=16, batch=8, micro_batch=2),
    "deep": Size(layers=48, hidden=32, heads=4, vocab=64, seq=8, batch=1, micro_batch=1),
    "100m": Size(layers=12, hidden=768, heads=12, vocab=16_000, seq=16, batch=1, micro_batch=1),
    "large": Size(layers=4, hidden=256, heads=8, vocab=1024, seq=128, batch=8, micro_batch=2),
}


def gpt_chunk(
    size: Size, *, is_first: bool, is_last: bool, vp_stage: int | None, **fields: Any
) -> GPTModel:
    """One chunk of the model; ``fields`` go to the engine's TransformerConfig."""
    config = TransformerConfig(
        num_layers=size.layers,
        hidden_size=size.hidden,
        num_attention_heads=size.heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **fields,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(),
        size.vocab,
        size.seq,
        pre_process=is_first,
        post_process=is_last,
        vp_stage=vp_stage,
    )


def call_gpt(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """Per-token losses ``[b, s]`` of ``tokens`` ``[b, s]``."""
    length = tokens.shape[1]
    positions = torch.arange(length, device=tokens.device).expand_as(tokens)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=tokens.device).triu(1)
    return model(tokens, positions, mask, labels=labels)


class TokenRows(Dataset[tuple[Tensor, Tensor]]):
    """Rows of random tokens from memory, without an end that a benchmark could reach."""

    def __init__(self, size: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        self._rows = torch.randint(0, size.vocab, (64, size.seq + 1), generator=generator)

    def __len__(self) -> int:
        return 10_000_000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = self._rows[index % len(self._rows)]
        return row[:-1], row[1:]


class EndlessOrder(DistributedSampler[Any]):
    """The order of an unshuffled DistributedSampler, without its list of all indices."""

    def __iter__(self) -> Any:
        return iter(range(self.rank, len(self.dataset), self.num_replicas))  # type: ignore[arg-type]


def batches(size: Any, *, replicas: int, replica: int) -> DataLoader[Any]:
    """Batches of one data-parallel rank, the same for every loop that is compared."""
    rows = TokenRows(size)
    order = EndlessOrder(rows, replicas, replica, shuffle=False)
    return DataLoader(
        rows, batch_size=size.batch, sampler=order, pin_memory=torch.cuda.is_available()
    )


class GPT(pl.LightningModule):
    """An ordinary LightningModule; ``build`` makes its model from a factory of chunks.

    Args:
        size: Of the model, whatever ``chunk`` takes.
        build: Makes the model from the Trainer and a factory of chunks.
        chunk: Builds a chunk, like ``gpt_chunk``.
        call: Calls the model for losses, like ``call_gpt``.
    """

    def __init__(
        self,
        size: Any,
        build: Callable[[pl.Trainer, Any], nn.Module],
        *,
        chunk: Callable[..., nn.Module] = gpt_chunk,
        call: Callable[[nn.Module, Tensor, Tensor], Tensor] = call_gpt,
    ) -> None:
        super().__init__()
        self.size = size
        self.build = build
        self.chunk = chunk
        self.call = call
        self.fields: dict[str, Any] = {}
        """What the strategy decided, for a direct loop that is to be configured alike."""
        self.model: nn.Module | None = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = self.build(self.trainer, self.make_chunk)

    def make_chunk(self, stage: Any, **fields: Any) -> nn.Module:
        self.fields = fields
        return self.chunk(
            self.size,
            is_first=stage.is_first,
            is_last=stage.is_last,
            vp_stage=stage.vp_stage,
            **fields,
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, labels = batch
        assert self.model is not None
        loss = self.call(self.model, tokens, labels).mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)


class FusedGPT(GPT):
    """The same with torch's fused AdamW, for Lightning's own strategies.

    Their precision plugins refuse to clip for fused optimizers, or (FSDP) to clip by norm at all,
    so the module clips itself.
    """

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            self.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True
        )

    def configure_gradient_clipping(self, optimizer: Any, *limits: Any, **named: Any) -> None:
        model: Any = self.trainer.strategy.model
        if hasattr(model, "clip_grad_norm_"):
            model.clip_grad_norm_(CLIP_NORM)
        else:
            nn.utils.clip_grad_norm_(self.parameters(), CLIP_NORM)
