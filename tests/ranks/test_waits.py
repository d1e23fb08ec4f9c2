"""Where the host waits for the device in a step: nowhere but for the engine's gradient norm."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_mcore.testing import run_ranks
from tests.ranks.trainers import SIZES, NumberedGPT, loader, make_trainer, numbered_tokens, ranks_of

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
STEPS = 4
NORM = {"local_multi_tensor_l2_norm", "get_grad_norm_fp32"}
"""Functions of the engine that read, or upload, on the way to the norm, where TransformerEngine is
not installed."""


class Waits(L.Callback):
    """Counts reads of tensors and blocking copies to the device over whole rounds of the loop."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        if batch_idx == 1:
            from syncs import Syncs

            self.syncs = Syncs()
            self.context = self.syncs.counting(torch.device("cpu"))
            self.context.__enter__()
        if batch_idx == 1 + STEPS:
            self.context.__exit__(None, None, None)


class Logs(NumberedGPT):
    """Logs what a step has on the device, and numbers of the host."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("squared", loss * loss, on_epoch=True)
        self.log_dict({"batch": batch_idx, "half": 0.5})
        return loss


def count(layout: str) -> tuple[Counter[str], Counter[str]]:
    sys.path.insert(0, str(BENCHMARKS))
    waits = Waits()
    trainer = make_trainer(
        {**SIZES[layout], "micro_batch_size": 2}, callbacks=[waits], gradient_clip_val=1.0
    )
    trainer.fit(Logs(), loader(numbered_tokens(64), 4))
    assert trainer.global_step > 2 + STEPS
    return waits.syncs.device, waits.syncs.uploads


@pytest.mark.parametrize("layout", ["dp2", "pp2vpp2"])
def test_only_the_gradient_norm_is_read(layout):
    for reads, uploads in run_ranks(count, ranks_of(layout), layout):
        assert {site.split()[-1] for site in reads} == NORM
        assert sum(reads.values()) == len(NORM) * STEPS
        assert {site.split()[-1] for site in uploads} <= NORM
