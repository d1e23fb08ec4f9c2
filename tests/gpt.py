"""The small GPT that tests train: one LightningModule, unedited, for every layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

VOCAB, HIDDEN, LAYERS, HEADS, SEQ = 64, 32, 4, 4, 16


def gpt_chunk(
    *,
    is_first: bool = True,
    is_last: bool = True,
    vp_stage: int | None = None,
    tied: bool = False,
    layers: int = LAYERS,
    experts: int | None = None,
    moe: Mapping[str, Any] | None = None,
    layer_spec: Any = None,
    **fields: Any,
) -> GPTModel:
    """One chunk of a GPT with ``layers`` layers in all; the defaults give the whole model.

    ``moe`` are further fields of the engine's config for the ``experts``.
    """
    if experts:
        fields = {
            "moe_router_topk": 2,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "alltoall",
            "add_bias_linear": False,
            **(moe or {}),
            **fields,
            "num_moe_experts": experts,
        }
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        **{"hidden_dropout": 0.0, "attention_dropout": 0.0, **fields},
    )
    return GPTModel(
        config,
        layer_spec or get_gpt_layer_local_spec(num_experts=experts),
        VOCAB,
        SEQ,
        pre_process=is_first,
        post_process=is_last,
        vp_stage=vp_stage,
        share_embeddings_and_output_weights=tied,
    )


def call_gpt(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """Per-token losses ``[b, s]`` of ``tokens`` ``[b, s]``."""
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    size = tokens.shape[1]
    mask = torch.ones(1, 1, size, size, dtype=torch.bool, device=tokens.device).triu(1)
    return model(tokens, positions, mask, labels=labels)


class GPT(L.LightningModule):
    """An ordinary LightningModule around a Megatron GPT."""

    def __init__(
        self,
        tied: bool = False,
        lr: float = 1e-2,
        optimizer: str = "AdamW",
        layers: int = LAYERS,
        experts: int | None = None,
        moe: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model: nn.Module | None = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = self.trainer.strategy.build(self.make_chunk)

    def make_chunk(self, stage: Any, **fields: Any) -> nn.Module:
        return gpt_chunk(
            is_first=stage.is_first,
            is_last=stage.is_last,
            vp_stage=stage.vp_stage,
            tied=self.hparams.tied,
            layers=self.hparams.layers,
            experts=self.hparams.experts,
            moe=self.hparams.moe,
            **fields,
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, labels = batch
        loss = call_gpt(self.model, tokens, labels).mean()
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        tokens, labels = batch
        self.log("val_loss", call_gpt(self.model, tokens, labels).mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        cls = getattr(torch.optim, self.hparams.optimizer)
        kwargs = {"momentum": 0.9} if self.hparams.optimizer == "SGD" else {}
        return cls(self.parameters(), lr=self.hparams.lr, weight_decay=0.01, **kwargs)


def token_dataset(samples: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Learnable sequences: each token follows from the last one by a rule picked per sample."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(samples):
        start, step = torch.randint(0, VOCAB, (2,), generator=generator).tolist()
        row = (start + (2 * (step % 3) + 1) * torch.arange(SEQ + 1)) % VOCAB
        rows.append((row[:-1].clone(), row[1:].clone()))
    return rows
