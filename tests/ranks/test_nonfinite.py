"""NaN and Inf in a gradient: what is said, what is left unchanged, on every rank alike."""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import pytest
import torch

from lightning_mcore.callbacks import LossSpike, OptimizerStats
from lightning_mcore.errors import NonFiniteError
from lightning_mcore.testing import run_ranks
from tests.ranks.trainers import SIZES, Blocks, block_weights, loader, make_trainer, numbered_rows

BAD_STEP = 3


class Poisoned(Blocks):
    """Its fourth step has a loss or a gradient that is not finite, on some rank."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        layout = self.trainer.strategy.layout
        bad = batch_idx == BAD_STEP and layout.dp_rank == layout.dp - 1
        self.factor = float("inf") if bad else 1.0
        if batch_idx == 0 and self.kind == "gradient" and layout.is_first_stage:
            weight = dict(self.named_parameters())["model.chunks.0.blocks.1.0.weight"]
            weight.register_hook(lambda grad: grad * self.factor)
        if batch_idx == 0 and self.kind == "clipped" and layout.is_first_stage:
            weight = dict(self.named_parameters())["model.chunks.0.blocks.1.0.weight"]
            weight.register_hook(lambda grad: grad + (self.factor - 1.0))
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if bad and self.kind == "loss" else loss


class Watch(L.Callback):
    """Learning rate and weights around the bad step, and what was logged."""

    def __init__(self) -> None:
        self.lrs: list[float] = []
        self.weights: list[dict[str, torch.Tensor]] = []
        self.logged: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        self.lrs.append(trainer.optimizers[0].param_groups[0]["lr"])
        self.weights.append(block_weights(module))
        self.logged.append({k: float(v) for k, v in trainer.callback_metrics.items()})


def outcome(
    layout: str, kind: str, policy: str, accumulate: int = 1, **options: Any
) -> dict[str, Any]:
    seen, module = Watch(), Poisoned(kind)
    if kind == "clipped":  # by value: Inf must not become a number first
        options |= {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}
    spikes = LossSpike(min_steps=2, window=10, every_n_steps=1)
    trainer = make_trainer(
        {**SIZES[layout], "nonfinite": policy, "micro_batch_size": 2},
        callbacks=[OptimizerStats(), spikes, seen],
        accumulate_grad_batches=accumulate,
        **options,
    )
    error = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, loader(numbered_rows(24), 4 if layout == "pp2" else 2))
        except NonFiniteError as raised:
            error = str(raised)
    return {
        "error": error,
        "weights": [*seen.weights, block_weights(module)],
        "lrs": seen.lrs,
        "warnings": [str(w.message) for w in caught if "gradient norm" in str(w.message)],
        "skipped": trainer.strategy.skipped_steps,
        "logged": seen.logged,
        "spikes": spikes.spikes,
    }


CASES = [
    (layout, kind, policy)
    for layout in ("pp2", "dp2")
    for kind in ("loss", "gradient")
    for policy in ("error", "skip", "warn")
] + [("dp2", "clipped", "error"), ("dp2", "clipped", "skip")]


def outcomes() -> list[dict[str, Any]]:
    return [outcome(*case) for case in CASES] + [outcome("dp2", "loss", "skip", accumulate=2)]


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def finite(weights: dict[str, torch.Tensor]) -> bool:
    return all(bool(torch.isfinite(value).all()) for value in weights.values())


def words(layout: str, kind: str) -> list[str]:
    if kind == "loss":
        where = (
            "rank 1 (stage 1, tp 0, dp 0)" if layout == "pp2" else "rank 1 (stage 0, tp 0, dp 1)"
        )
        return [f"The loss was nan on {where}, microbatch 0.", "'blocks.3.bias'", "backward pass"]
    return ["blocks.1.0.weight'", "1 of"]


def test_policies():
    ranks = run_ranks(outcomes, 2)
    for (layout, kind, policy), results in zip(CASES, zip(*ranks, strict=True), strict=False):
        about = f"{layout} {kind} {policy}"
        for seen in results:
            said = seen["error"] if policy == "error" else " ".join(seen["warnings"])
            if policy == "error" or seen is results[0]:
                for part in words(layout, kind):
                    assert part in said, f"{about}: {said}"
            before = seen["weights"][BAD_STEP - 1]
            if policy == "error":
                assert said == results[0]["error"], about
                assert "No parameter was changed" in said
                assert len(seen["weights"]) == BAD_STEP + 1
                assert equal(seen["weights"][-1], before), about
                continue
            assert seen["error"] is None
            if policy == "warn":
                assert seen["skipped"] == 0
                if kind == "loss":
                    assert not finite(seen["weights"][-1]), about
                continue
            assert equal(seen["weights"][BAD_STEP], before), about
            assert not equal(seen["weights"][BAD_STEP + 1], before), about
            assert finite(seen["weights"][-1]), about
            assert seen["skipped"] == 1
            assert [m["optimizer/skipped"] for m in seen["logged"]] == [0, 0, 0, 1, 0, 0]
            assert seen["logged"][-1]["optimizer/skipped_steps"] == 1
            # The schedule counts steps that changed parameters.
            assert seen["lrs"] == pytest.approx([1e-2 * 0.5**n for n in (1, 2, 3, 3, 4, 5)])
            if kind == "loss":
                assert [step for step, _, _ in seen["spikes"]] == [BAD_STEP + 1]
                assert seen["logged"][-1]["loss_spikes"] == 1
    for seen in (rank[-1] for rank in ranks):
        assert seen["skipped"] == 1, "one step of two batches each"
        assert finite(seen["weights"][-1])
