"""Losses weighted by tokens in plain torch blocks: the same as weighting by hand in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_mcore.testing import run_ranks
from tests.ranks.trainers import (
    Blocks,
    Recorder,
    block_weights,
    joined,
    loader,
    make_blocks,
    make_trainer,
    numbered_rows,
)

ROWS, STEPS, LR = 32, 4, 0.5
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "dp2-2mb": {"micro_batch_size": 2},
    "pp2-2mb": {"pp": 2, "micro_batch_size": 4},
}


def count_of(ids: Tensor) -> Tensor:
    """What each row counts: 0 to 3, as tokens would."""
    return (ids * 7 % 4).float()


class Counted(Blocks):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        counts = count_of(batch["id"])
        loss = (self.losses(batch) * counts).sum() / counts.sum().clamp(min=1)
        self.log("train_loss", loss)
        return {"loss": loss, "num_tokens": int(counts.sum())}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=LR)


def train(accumulate: int) -> list[Any]:
    """Every layout in turn: weights, losses, gradient norms, and rows of each batch."""
    seen = []
    for strategy in LAYOUTS.values():
        recorder, module = Recorder(), Counted()
        trainer = make_trainer(
            {**strategy, "per_token_loss": True},
            callbacks=[recorder],
            accumulate_grad_batches=accumulate,
        )
        size = ROWS // STEPS // accumulate * strategy.get("pp", 1) // 2
        trainer.fit(module, loader(numbered_rows(ROWS), size))
        logged = [metrics["train_loss"] for metrics in recorder.metrics]
        seen.append((block_weights(module), logged, recorder.grad_norms, recorder.ids))
    return seen


def train_by_hand(batches: list[list[int]], accumulate: int) -> tuple[Any, list[float], Any]:
    """The rows of each batch, in a loop of torch alone."""
    data, model = numbered_rows(ROWS), make_blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses, norms = [], []
    for step in range(0, len(batches), accumulate):
        optimizer.zero_grad()
        total = sum(count_of(torch.tensor(ids)).sum() for ids in batches[step : step + accumulate])
        for ids in batches[step : step + accumulate]:
            x, y = (torch.stack([data[i][name] for i in ids]) for name in ("x", "y"))
            counts = count_of(torch.tensor(ids))
            summed = ((model(x) - y).square().mean(1) * counts).sum()
            losses.append(float(summed / counts.sum()))
            (summed / total).backward()
        norms.append(float(torch.stack([p.grad.norm() for p in model.parameters()]).norm()))
        optimizer.step()
    return block_weights(model), losses, norms


@pytest.mark.parametrize("accumulate", [1, 2])
def test_as_by_hand(accumulate):
    by_rank = run_ranks(train, 2, accumulate)
    for name, ranks in zip(LAYOUTS, zip(*by_rank, strict=True), strict=True):
        parts = [ids for *_, ids in ranks]
        # Stages see the same rows, copies different ones.
        batches = (
            parts[0]
            if "pp" in LAYOUTS[name]
            else [mine + other for mine, other in zip(*parts, strict=True)]
        )
        assert len(batches) == STEPS * accumulate
        weights, losses, norms = train_by_hand(batches, accumulate)
        for _, logged, seen_norms, _ in ranks:
            assert logged == pytest.approx(losses, abs=1e-5), name
            assert seen_norms[accumulate - 1 :: accumulate] == pytest.approx(norms, rel=1e-4), name
        for key, value in joined([part for part, *_ in ranks]).items():
            torch.testing.assert_close(value, weights[key], rtol=0, atol=1e-5)
