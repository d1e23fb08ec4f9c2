"""torchmetrics objects of a module give one process's value on every rank of every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchmetrics

from lightning_mcore.testing import run_ranks
from tests.ranks.trainers import (
    SIZES,
    Blocks,
    as_floats,
    dp_of,
    loader,
    make_blocks,
    make_trainer,
    numbered_rows,
    ranks_of,
)

ROWS, BATCH = 24, 8


class Measured(Blocks):
    """Updates metrics behind the model call, which runs on the last stage only."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()
        self.all = torchmetrics.CatMetric()
        self.largest = torchmetrics.MaxMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        losses = self.losses(batch)
        self.mean(losses)
        self.all.update(losses)
        self.largest.update(losses)
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        self.log("largest", self.largest, on_step=False, on_epoch=True)

    def on_validation_epoch_end(self) -> None:
        every = self.all.compute()
        self.log("count", float(every.numel()))
        self.log("median", every.median())
        self.all.reset()


def validate(layout: str) -> tuple[dict[str, float], bool]:
    torch.manual_seed(3)
    module = Measured()
    compute = module.mean.compute
    trainer = make_trainer({**SIZES[layout], "micro_batch_size": 2})
    trainer.validate(module, loader(numbered_rows(ROWS), BATCH // dp_of(layout)), verbose=False)
    return as_floats(trainer.callback_metrics), module.mean.compute == compute


@pytest.mark.parametrize("layout", ["dp2", "pp2", "pp2vpp2", "dp2pp2"])
def test_metrics_are_those_of_one_process_on_every_rank(layout):
    rows = numbered_rows(ROWS)
    model = make_blocks()
    with torch.no_grad():
        x = torch.stack([row["x"] for row in rows])
        y = torch.stack([row["y"] for row in rows])
        losses = (model(x) - y).square().mean(1)
    for seen, restored in run_ranks(validate, ranks_of(layout), layout):
        assert seen["mean_epoch"] == pytest.approx(float(losses.mean()), rel=1e-5)
        assert seen["largest"] == pytest.approx(float(losses.max()), rel=1e-5)
        assert seen["median"] == pytest.approx(float(losses.median()), rel=1e-5)
        assert seen["count"] == ROWS
        assert restored, "the run leaves compute() as it was"


class Classifier(Measured):
    """Logs a metric called in training, on_step and on_epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = self.losses(batch)
        self.mean(losses)
        self.log("train_mean", self.mean, on_step=True, on_epoch=True)
        return losses.mean()


def train(layout: str) -> dict[str, float]:
    # Lightning's own sampler shuffles for training, which one process does not.
    trainer = make_trainer(
        {**SIZES.get(layout, {}), "micro_batch_size": 4}, use_distributed_sampler=dp_of(layout) > 1
    )
    trainer.fit(Classifier(), loader(numbered_rows(ROWS), BATCH // dp_of(layout)))
    return as_floats(trainer.callback_metrics)


@pytest.mark.parametrize("layout", ["pp2", "pp2vpp2", "dp2pp2"])
def test_training_metrics_agree_between_ranks_and_layouts(layout):
    results = run_ranks(train, ranks_of(layout), layout)
    assert all(result == results[0] for result in results)
    if dp_of(layout) == 1:
        (alone,) = run_ranks(train, 1, "tp1")
        assert results[0]["train_mean_epoch"] == pytest.approx(alone["train_mean_epoch"], rel=1e-4)
