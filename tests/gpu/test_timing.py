"""CommTimings and TraceExport on GPUs over NCCL."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
from lightning.pytorch.plugins.environments import LightningEnvironment

from lightning_mcore import MCoreStrategy
from lightning_mcore.callbacks import CommTimings, TraceExport
from lightning_mcore.testing import run_ranks
from lightning_mcore.timeline import StepTimes, load_timelines
from tests.gpt import GPT, token_dataset
from tests.gpu.gpus import needs_gpus
from tests.gpu.te_gpt import TEGPT, te_train
from tests.ranks.trainers import loader

pytestmark = needs_gpus(2, te=False)


def sample(strategy: dict[str, Any], folder: str) -> tuple[list[StepTimes], str]:
    timings, export = CommTimings(4, 2, picture=False), TraceExport(4, 2, dirpath=folder)
    trainer = L.Trainer(
        accelerator="gpu",
        devices=2,
        strategy=MCoreStrategy(**strategy),
        plugins=[LightningEnvironment()],
        callbacks=[timings, export],
        max_steps=6,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(GPT(), loader(token_dataset(8 * 2 * 8), 8))
    return timings.latest, str(export.path)


@pytest.mark.parametrize(
    ("strategy", "group"),
    [({}, "dp"), ({"tp": 2}, "tp"), ({"pp": 2, "micro_batch_size": 2}, "pp")],
)
def test_nccl_is_attributed_to_its_group(strategy, group, tmp_path):
    times, trace = run_ranks(sample, 2, strategy, str(tmp_path), timeout_s=240)[0]
    for rank in times:
        parts = rank.compute_us + rank.exposed_us + rank.idle_us
        assert parts == pytest.approx(rank.step_us, rel=0.01)
        assert rank.groups[group].operations > 0
        assert rank.groups[group].bytes > 0
        assert "other" not in rank.groups
    for timeline in load_timelines([trace]):
        passes = [m for m in timeline.marks if m.name in ("forward", "backward")]
        assert any(mark.on_device for mark in passes)


WIDE = {"seq": 2048, "hidden_size": 4096, "num_attention_heads": 32, "num_layers": 4}
"""Wide enough that the GPU, not the host, takes the time of a step."""


def exposed(switches: dict[str, Any], group: str) -> list[tuple[float, float, int]]:
    """Exposed and total microseconds of ``group``, and its operations, on each rank."""
    timings = CommTimings(5, 1, picture=False)
    te_train(2, {"micro_batch_size": 4, **switches}, module=TEGPT(**WIDE), callbacks=[timings])
    times = [rank.groups[group] for rank in timings.latest]
    return [(found.exposed_us, found.busy_us, found.operations) for found in times]


@needs_gpus(2, own=True)
@pytest.mark.parametrize(
    ("common", "off", "on", "group"),
    [
        ({}, {"comm": "safe"}, {"overlap_grad_reduce": True}, "dp"),
        (
            {"tp": 2, "sequence_parallel": True},
            {"tp_comm_overlap": False},
            {"tp_comm_overlap": True},
            "tp",
        ),
    ],
    ids=["gradients", "userbuffers"],
)
def test_overlap_lowers_exposed_time(common, off, on, group):
    """What is hidden under compute on the device no longer counts as exposed."""
    plain = run_ranks(exposed, 2, {**common, **off}, group, timeout_s=240)[0]
    overlapped = run_ranks(exposed, 2, {**common, **on}, group, timeout_s=240)[0]
    print("exposed, total, operations:", plain, overlapped)
    # On the rank that waits least for the other, which is behind in this step or that.
    before = min(found[0] for found in plain)
    after, total, operations = min(overlapped)
    assert operations > 0
    assert after < 0.8 * before
    assert after < 0.8 * total
