"""Validation, test and prediction under each layout, also between training steps."""

import pytest
import torch

from lightning_mcore.testing import run_ranks
from tests.ranks.trainers import (
    SIZES,
    NumberedGPT,
    Recorder,
    as_floats,
    dp_of,
    loader,
    make_trainer,
    numbered_tokens,
    ranks_of,
)

PER_REPLICA = 7
"""Evaluation samples on each data-parallel rank."""


class CountingGPT(NumberedGPT):
    """Logs what it evaluated as well, so that a lost or repeated sample changes a value."""

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.log("samples", float(len(batch["id"])), reduce_fx="sum")
        self.log("ids", batch["id"].double().sum(), reduce_fx="sum")

    def test_step(self, batch, batch_idx):
        super().test_step(batch, batch_idx)
        self.log("samples", float(len(batch["id"])), reduce_fx="sum")


def evaluate(layout, batch_size, micro_batch_size):
    """Validates, tests and predicts one fixed model; returns values and predictions."""
    module = CountingGPT()
    trainer = make_trainer({**SIZES[layout], "micro_batch_size": micro_batch_size})
    data = numbered_tokens(PER_REPLICA * dp_of(layout))
    batches = loader(data, batch_size)
    (validated,) = trainer.validate(module, batches, verbose=False)
    (tested,) = trainer.test(module, batches, verbose=False)
    predicted = trainer.predict(module, batches)
    return {
        "dp_rank": trainer.strategy._sizes if False else None,
        "validated": as_floats(validated),
        "tested": as_floats(tested),
        "ids": [part["id"].tolist() for part in predicted],
        "losses": [value for part in predicted for value in part["loss"].tolist()],
    }
