"""Layouts on real GPUs over NCCL: the same losses and gradient norms from the same weights."""

from __future__ import annotations

import math
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch.utils.data import DataLoader

from lightning_mcore import MCoreStrategy
from lightning_mcore.testing import run_ranks
from tests.gpt import GPT, token_dataset
from tests.gpu.gpus import needs_gpus
from tests.gpu.te_gpt import fill_by_name

pytestmark = needs_gpus(2, te=False)

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2": {"tp": 2, "micro_batch_size": 2},
    "pp2": {"pp": 2, "micro_batch_size": 2},
    "pp2vpp2": {"pp": 2, "vpp": 2, "overlap_p2p": True, "micro_batch_size": 2},
    "dp2nccl": {
        "average_in_collective": True,
        "nccl_communicators": {"dp_cp": {"max_ctas": 8}},
        "high_priority_streams": ["dp_cp"],
    },
    "pp2synchronized": {"pp": 2, "batch_p2p_sync": True, "micro_batch_size": 2},
    "pp2unbatched": {"pp": 2, "batch_p2p": False, "micro_batch_size": 2},
    "pp2vpp2flush": {"pp": 2, "vpp": 2, "overlap_p2p_warmup_flush": True, "micro_batch_size": 2},
    "pp2vpp2safe": {"pp": 2, "vpp": 2, "comm": "safe", "micro_batch_size": 2},
    "dp2tp2": {"tp": 2, "use_distributed_optimizer": True},
    "tp2pp2": {"tp": 2, "pp": 2, "micro_batch_size": 2},
    "tp2pp2vpp2": {"tp": 2, "pp": 2, "vpp": 2, "overlap_p2p": True, "micro_batch_size": 2},
    "pp4": {"pp": 4, "micro_batch_size": 2},
    "pp4unbatched": {"pp": 4, "batch_p2p": False, "micro_batch_size": 2},
    "dp2tp2pp2vpp2": {"tp": 2, "pp": 2, "vpp": 2, "comm": "max", "micro_batch_size": 1},
    "dp2pp4": {"pp": 4, "use_distributed_optimizer": True, "micro_batch_size": 1},
    "tp4pp2": {"tp": 4, "pp": 2, "micro_batch_size": 2},
}


def ranks_of(layout: str) -> int:
    """Processes that a layout takes."""
    sizes = LAYOUTS[layout]
    copies = 2 if layout.startswith("dp2") else 1
    return copies * int(sizes.get("tp", 1)) * int(sizes.get("pp", 1))


class SameWeights(GPT):
    """Fills every parameter from its name in the whole model, so that all layouts start alike."""

    def make_chunk(self, stage: Any, **fields: Any) -> Any:
        chunk = super().make_chunk(stage, **fields)
        fill_by_name(chunk, self.trainer.strategy.layout)
        return chunk


class Seen(L.Callback):
    def __init__(self) -> None:
        self.steps: list[tuple[float, float]] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        self.steps.append((float(outputs["loss"]), trainer.strategy.step_stats.grad_norm))


def train(layout: str, precision: str) -> list[tuple[float, float]]:
    seen = Seen()
    trainer = L.Trainer(
        accelerator="gpu",
        devices=ranks_of(layout),
        strategy=MCoreStrategy(**LAYOUTS[layout]),
        precision=precision,
        max_steps=6,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[seen],
        # Named, since looking for others starts MPI where mpi4py is installed.
        plugins=[LightningEnvironment()],
    )
    batch = 4 if layout.startswith("dp2") else 8
    trainer.fit(SameWeights(), DataLoader(token_dataset(64), batch_size=batch))
    return seen.steps


@pytest.fixture(scope="module")
def reference() -> list[tuple[float, float]]:
    return run_ranks(train, 2, "dp2", "32-true", timeout_s=300)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=needs_gpus(ranks_of(name), te=False))
        for name in LAYOUTS
        if name != "dp2"
    ],
)
def test_fp32_layouts_agree(layout, reference):
    for steps in run_ranks(train, ranks_of(layout), layout, "32-true", timeout_s=300):
        for (loss, norm), (expected, expected_norm) in zip(steps, reference, strict=True):
            assert math.isfinite(loss)
            assert loss == pytest.approx(expected, abs=2e-5)
            assert norm == pytest.approx(expected_norm, rel=3e-4)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "16-mixed"])
@pytest.mark.parametrize("layout", ["dp2", "pp2vpp2"])
def test_low_precision_follows_fp32(layout, precision, reference):
    for steps in run_ranks(train, 2, layout, precision, timeout_s=300):
        for (loss, _), (expected, _) in zip(steps, reference, strict=True):
            assert math.isfinite(loss)
            assert loss == pytest.approx(expected, abs=2e-2)
