"""A GPT of TransformerEngine's layers, with weights that do not depend on the layout."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_mcore import MCoreStrategy
from tests.context_gpt import token_mean

VOCAB, HIDDEN, LAYERS, HEADS, SEQ, BATCH, STEPS = 128, 256, 2, 4, 256, 4, 6


def te_chunk(
    dims: dict[str, Any],
    seq: int,
    *,
    is_first: bool,
    is_last: bool,
    vp_stage: int | None,
    **fields: Any,
) -> nn.Module:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        **{
            "num_layers": LAYERS,
            "hidden_size": HIDDEN,
            "num_attention_heads": HEADS,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            **dims,
        },
        **fields,
    )
    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm
    )
    return GPTModel(
        config,
        spec,
        VOCAB,
        seq,
        pre_process=is_first,
        post_process=is_last,
        vp_stage=vp_stage,
        share_embeddings_and_output_weights=False,
    )


def _name_in_whole(chunk: Any, name: str) -> str:
    """A parameter's name with its layer's number in the whole model instead of in the stage."""
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(chunk.decoder.layers[int(parts[2])].layer_number - 1)
    return ".".join(parts)


def fill_by_name(chunk: Any, layout: Any) -> None:
    """Gives every parameter its part of a full tensor drawn from its name in the whole model."""
    with torch.no_grad():
        for name, param in chunk.named_parameters():
            shape, dim = list(param.shape), None
            if getattr(param, "tensor_model_parallel", False):
                dim = param.partition_dim
                shape[dim] *= layout.tp
            key = _name_in_whole(chunk, name)
            generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
            full = (
                torch.randn(shape, generator=generator, device="cpu") * 0.05
                if param.dim() > 1
                else torch.full(shape, float("norm" in name and name.endswith("weight")))
            )
            param.copy_(full if dim is None else full.chunk(layout.tp, dim)[layout.tp_rank])


class TEGPT(L.LightningModule):
    """Counts the tokens of a mask; its step is the same for any ``cp`` and ``tp``.

    ``dims`` are fields of the engine's TransformerConfig other than those of the small model.
    """

    def __init__(self, seq: int = SEQ, **dims: Any) -> None:
        super().__init__()
        self.seq, self.dims = seq, dims
        self.model_dims = {
            "seq_length": seq,
            "hidden_size": dims.get("hidden_size", HIDDEN),
            "num_attention_heads": dims.get("num_attention_heads", HEADS),
        }
        self.model: nn.Module | None = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = self.trainer.strategy.build(self.make_chunk)

    def make_chunk(self, stage: Any, **fields: Any) -> nn.Module:
        where = {"is_first": stage.is_first, "is_last": stage.is_last, "vp_stage": stage.vp_stage}
        chunk = te_chunk(self.dims, self.seq, **where, **fields)
        if "hidden_size" not in self.dims:  # a wide model would take seconds, for nothing
            fill_by_name(chunk, self.trainer.strategy.layout)
        return chunk

    def losses(self, batch: Any) -> Tensor:
        tokens, labels, _ = batch
        positions = self.trainer.strategy.position_ids(tokens)
        return self.model(tokens, positions, None, labels=labels)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, count = token_mean(self.losses(batch), batch[2])
        self.log("train_loss", loss)
        return {"loss": loss, "num_tokens": count}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss, count = token_mean(self.losses(batch), batch[2])
        self.log("val_loss", loss)
        return {"num_tokens": count}

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-3)


def te_dataset(samples: int, seq: int = SEQ) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Tokens, labels and an uneven mask."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(samples):
        start, step = torch.randint(0, VOCAB, (2,), generator=generator).tolist()
        row = (start + (2 * (step % 3) + 1) * torch.arange(seq + 1)) % VOCAB
        kept = torch.rand(seq, generator=generator) < torch.rand(1, generator=generator)
        kept[: seq // 4] = False
        rows.append((row[:-1].clone(), row[1:].clone(), kept.float()))
    return rows


class Seen(L.Callback):
    """Loss and gradient norm of each step, the losses of validation, and how many CUDA graphs."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float]] = []
        self.validation: list[float] = []
        self.graphs = 0

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        self.steps.append((float(outputs["loss"]), trainer.strategy.step_stats.grad_norm))
        graphs = trainer.strategy._run.graphs
        self.graphs = 0 if graphs is None else graphs.count

    def on_validation_end(self, trainer, module) -> None:
        self.validation.append(float(trainer.callback_metrics["val_loss"]))


def te_train(
    devices: int,
    strategy: dict[str, Any],
    *,
    module: TEGPT | None = None,
    validation: int = BATCH,
    steps: int = STEPS,
    callbacks: Sequence[L.Callback] = (),
    ckpt_path: str | None = None,
) -> Seen:
    """Trains on this rank and validates once, on ``validation`` samples."""
    seen, module = Seen(), module or TEGPT()
    trainer = L.Trainer(
        accelerator="gpu",
        devices=devices,
        strategy=MCoreStrategy(**{"per_token_loss": True, "micro_batch_size": 2, **strategy}),
        precision="bf16-mixed",
        max_epochs=1,
        limit_train_batches=steps,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[seen, *callbacks],
        # Named, since looking for others starts MPI where mpi4py is installed.
        plugins=[LightningEnvironment()],
    )
    data = te_dataset(steps * BATCH, module.seq)
    trainer.fit(
        module,
        DataLoader(data, batch_size=BATCH),
        DataLoader(data[:validation], batch_size=BATCH),
        ckpt_path=ckpt_path,
    )
    return seen
