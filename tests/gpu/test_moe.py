"""Dispatchers on real GPUs: DeepEP and the combined 1F1B schedule against plain all-to-all."""

from __future__ import annotations

import math
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.plugins.environments import LightningEnvironment
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.utils.data import DataLoader

from lightning_mcore import MCoreStrategy
from lightning_mcore.experts import probe_deep_ep
from lightning_mcore.testing import run_ranks
from tests.gpt import GPT, SEQ, VOCAB, token_dataset
from tests.gpu.gpus import needs_gpus

pytestmark = [pytest.mark.slow, needs_gpus(2, te=False)]


def need(package: str) -> None:
    if package == "te":
        pytest.importorskip("transformer_engine.pytorch")
    elif (found := probe_deep_ep()).version is None:
        pytest.skip(f"deep_ep cannot be used: {found.problem}")


class Experts(GPT):
    """A GPT of TransformerEngine's layers with grouped experts, wide enough for DeepEP."""

    def make_chunk(self, stage: Any, **fields: Any) -> Any:
        config = TransformerConfig(
            num_layers=2,
            hidden_size=1024,
            num_attention_heads=8,
            num_moe_experts=8,
            moe_ffn_hidden_size=512,
            moe_router_topk=2,
            moe_router_dtype="fp32",
            moe_router_load_balancing_type="aux_loss",
            moe_aux_loss_coeff=1e-2,
            moe_grouped_gemm=True,
            add_bias_linear=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            **fields,
        )
        spec = get_gpt_layer_with_transformer_engine_spec(num_experts=8, moe_grouped_gemm=True)
        place = {"pre_process": stage.is_first, "post_process": stage.is_last}
        return GPTModel(config, spec, VOCAB, SEQ, **place, vp_stage=stage.vp_stage)


class Seen(L.Callback):
    def __init__(self) -> None:
        self.steps: list[tuple[float, float]] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        self.steps.append((float(outputs["loss"]), trainer.strategy.step_stats.grad_norm))


def train(settings: dict[str, Any]) -> list[tuple[float, float]]:
    seen = Seen()
    L.seed_everything(5)  # weights are drawn from it, alike in every run
    trainer = L.Trainer(
        accelerator="gpu",
        devices=2,
        strategy=MCoreStrategy(micro_batch_size=2, **settings),
        precision="bf16-mixed",
        max_steps=6,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[seen],
        plugins=[LightningEnvironment()],
    )
    trainer.fit(Experts(lr=1e-4), DataLoader(token_dataset(128), batch_size=8))
    return seen.steps


@pytest.fixture(scope="module")
def alltoall() -> list[tuple[float, float]]:
    need("te")
    return run_ranks(train, 2, {"ep": 2, "moe_dispatcher": "alltoall"}, timeout_s=300)[0]


@pytest.mark.parametrize(
    ("settings", "package"),
    [
        ({"ep": 2, "moe_dispatcher": "deepep"}, "deep_ep"),
        ({"ep": 2, "moe_dispatcher": "allgather"}, "te"),
        ({"ep": 2, "moe_dispatcher": "alltoall", "overlap_moe": "1f1b"}, "te"),
        ({"ep": 2, "overlap_moe": "1f1b", "delay_wgrad_compute": True}, "te"),
    ],
    ids=str,
)
def test_equals_alltoall(settings, package, alltoall):
    """The same experts and tokens: forward and backward may differ in the order of bf16 sums."""
    need(package)
    for steps in run_ranks(train, 2, settings, timeout_s=300):
        assert len(steps) == 6
        assert all(math.isfinite(number) for step in steps for number in step)
        for (loss, norm), (expected, expected_norm) in zip(steps, alltoall, strict=True):
            assert loss == pytest.approx(expected, abs=1e-2)
            assert norm == pytest.approx(expected_norm, rel=2e-2)
