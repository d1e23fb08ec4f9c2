"""Lightning's own shuffling sampler under the strategy: which samples form a global batch."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_mcore import MCoreStrategy
from lightning_mcore.testing import run_ranks
from tests.gpt import SEQ
from tests.parity.layouts import ParityGPT
from tests.parity.recipes import GLOBAL_BATCH, Training

SAMPLES, EPOCHS = 24, 2
LAYOUTS = {"dp2": (2, 2, {}), "pp2": (2, 1, {"pp": 2}), "tp2dp2": (4, 2, {"tp": 2})}
"""Processes, data-parallel size and arguments of the strategy."""


class Rows(L.Callback):
    """Token rows of each batch."""

    def __init__(self) -> None:
        self.batches: list[list[list[int]]] = []
        self.dp_rank = -1

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        self.batches.append(batch[0].tolist())
        self.dp_rank = trainer.strategy.layout.dp_rank


def _draw(world_size: int, dp: int, strategy: dict[str, Any]) -> tuple[int, list[list[int]]]:
    """Data-parallel rank, and the place in the data set of each batch's samples."""
    rows = Rows()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=MCoreStrategy(**strategy),
        callbacks=[rows],
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # Each sample says its place in the data set.
    data = [(torch.full((SEQ,), i), torch.full((SEQ,), i)) for i in range(SAMPLES)]
    trainer.fit(ParityGPT(Training()), DataLoader(data, batch_size=GLOBAL_BATCH // dp))
    return rows.dp_rank, [[row[0] for row in batch] for batch in rows.batches]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_global_batches_are_those_of_one_shuffle(layout):
    """Whatever the layout: the ``k``-th 8 samples of the epoch's permutation."""
    world_size, dp, strategy = LAYOUTS[layout]
    ranks = run_ranks(_draw, world_size, world_size, dp, strategy)
    assert {dp_rank for dp_rank, _ in ranks} == set(range(dp))
    per_epoch = SAMPLES // GLOBAL_BATCH
    for epoch in range(EPOCHS):
        generator = torch.Generator().manual_seed(epoch)
        order = torch.randperm(SAMPLES, generator=generator).tolist()
        for dp_rank, batches in ranks:
            assert len(batches) == EPOCHS * per_epoch
            for index in range(per_epoch):
                whole = order[index * GLOBAL_BATCH : (index + 1) * GLOBAL_BATCH]
                assert batches[epoch * per_epoch + index] == whole[dp_rank::dp]
