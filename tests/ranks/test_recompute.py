"""Recomputed activations, with dropout: the same training as with kept ones, to the bit.

A layer that runs again in the backward pass must draw the masks that it drew before, from the
streams of its rank, and leave them where the next layer expects them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import lightning as L
import pytest
from torch import nn

from lightning_mcore.testing import run_ranks
from tests.gpt import GPT, gpt_chunk, token_dataset
from tests.ranks.trainers import loader, make_trainer, refused

STEPS = 4
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"micro_batch_size": 2},
    "tp2": {"tp": 2, "sequence_parallel": False},
    "tp2 sequence parallel": {"tp": 2, "sequence_parallel": True, "micro_batch_size": 4},
    "pp2vpp2": {"pp": 2, "vpp": 2, "micro_batch_size": 2},
}
DROPPING = {"hidden_dropout": 0.2, "attention_dropout": 0.2, "add_bias_linear": False}
EVERY_LAYER = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
MLP = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
RECOMPUTED: dict[str, dict[str, Any]] = {
    "full": EVERY_LAYER,
    "attention": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "MLP": MLP,
}
"""Modules whose output is thrown away, such as "layernorm", need TransformerEngine."""
SPREAD = EVERY_LAYER | {"distribute_saved_activations": True}
"""For tensor parallelism without sequence parallelism."""


class Dropping(GPT):
    """A GPT with dropout that counts how often its layers' parts run."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__()
        self.fields = fields
        self.calls: Counter[str] = Counter()
        self.steps: list[tuple[float, float]] = []

    def make_chunk(self, stage: Any, **fields: Any) -> nn.Module:
        chunk = gpt_chunk(
            is_first=stage.is_first,
            is_last=stage.is_last,
            vp_stage=stage.vp_stage,
            **{**DROPPING, **self.fields, **fields},
        )
        for layer in chunk.decoder.layers:
            parts = {"attention": layer.self_attention.core_attention, "mlp": layer.mlp}
            for name, part in parts.items():
                part.register_forward_pre_hook(lambda *_, name=name: self.calls.update([name]))
        return chunk

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        norm = self.trainer.strategy.step_stats.grad_norm
        self.steps.append((float(outputs["loss"]), float(norm)))


def train(sizes: Mapping[str, Any], fields: Mapping[str, Any]) -> Any:
    L.seed_everything(3)
    module = Dropping(fields)
    make_trainer(sizes, max_steps=STEPS).fit(module, loader(token_dataset(8 * STEPS), 4))
    return module.steps, module.calls


def all_runs() -> Any:
    found = {}
    for layout, sizes in LAYOUTS.items():
        cases = {"none": {}, **RECOMPUTED}
        if layout == "tp2":
            cases["full, distributed"] = SPREAD
        found[layout] = {name: train(sizes, fields) for name, fields in cases.items()}
    biased = {"add_bias_linear": True}
    cases = {"none": {}, "full": EVERY_LAYER, "attention": RECOMPUTED["attention"]}
    found["with biases"] = {
        name: train(LAYOUTS["tp2"], biased | fields) for name, fields in cases.items()
    }
    pipeline = {"pp": 2, "micro_batch_size": 2}
    found["refused"] = refused(lambda: train(pipeline, MLP | biased))
    return found


@pytest.fixture(scope="module")
def runs() -> Any:
    return run_ranks(all_runs, 2, timeout_s=120)


@pytest.mark.parametrize("layout", [*LAYOUTS, "with biases"])
def test_the_same_training(runs, layout):
    for rank in runs:
        (kept, _), *others = rank[layout].values()
        assert len(kept) == STEPS
        assert all(math.isfinite(value) for step in kept for value in step)
        assert len({loss for loss, _ in kept}) == STEPS, "nothing was trained"
        for name, (steps, _) in zip(list(rank[layout])[1:], others, strict=True):
            assert steps == kept, name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_asked_for_runs_twice(runs, layout):
    for rank in runs:
        calls = {name: found for name, (_, found) in rank[layout].items()}
        once = calls["none"]
        assert once["mlp"] == once["attention"] > 0
        assert calls["full"] == Counter({name: 2 * count for name, count in once.items()})
        assert calls["MLP"] == once + Counter(mlp=once["mlp"])
        assert calls["attention"]["mlp"] == once["mlp"]


def test_an_endless_backward_pass_is_refused(runs):
    """With a bias, which the engine's own loop never gets over (stage.py)."""
    for rank in runs:
        assert "excludes `add_bias_linear` (True)" in rank["refused"]
