"""Long runs and many runs in one process leave nothing behind."""

from __future__ import annotations

import gc
import os
import threading
from typing import Any

import lightning as L
import psutil
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_mcore.callbacks import LossSpike, OptimizerStats, Throughput
from lightning_mcore.testing import run_ranks
from tests.ranks.trainers import Blocks, loader, make_trainer, numbered_rows

FULL = bool(os.environ.get("MCORE_SOAK"))
"""Whether to take the time (about two minutes) for 2,000 steps and 30 Trainers."""


def usage() -> dict[str, int]:
    gc.collect()
    process = psutil.Process()
    return {
        "rss": process.memory_info().rss,
        "fds": process.num_fds(),
        "threads": process.num_threads(),
    }


class Usage(L.Callback):
    """Resources of this process every ``every`` steps, always after a save and validation."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.seen: list[dict[str, int]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step % self.every == 1:
            self.seen.append(usage())


def long_run(folder: str, steps: int, every: int) -> list[dict[str, int]]:
    seen = Usage(every)
    trainer = make_trainer(
        {"pp": 2, "micro_batch_size": 4},
        max_steps=steps,
        max_epochs=-1,
        enable_checkpointing=True,
        val_check_interval=every // 2,
        check_val_every_n_epoch=None,
        default_root_dir=folder,
        callbacks=[
            seen,
            OptimizerStats(),
            LossSpike(),
            Throughput(),
            ModelCheckpoint(folder, every_n_train_steps=every // 2, save_top_k=1),
        ],
    )
    trainer.fit(Blocks(), loader(numbered_rows(64), 8), loader(numbered_rows(8), 8))
    return seen.seen


def check_level(seen: list[dict[str, int]], warm_up: int) -> None:
    start, end = seen[warm_up], seen[-1]
    assert end["fds"] <= start["fds"], seen
    assert end["threads"] <= start["threads"], seen
    assert end["rss"] < 1.01 * start["rss"], seen


@pytest.mark.slow
def test_a_long_run_stays_level(tmp_path):
    steps = 2000 if FULL else 400
    for seen in run_ranks(long_run, 2, str(tmp_path), steps, steps // 20, timeout_s=280):
        check_level(seen, warm_up=5)


def state() -> dict[str, Any]:
    return {
        "environment": dict(os.environ),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "groups": len(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else 0,
        "cuda": torch.Tensor.cuda,
        **usage(),
    }


def many_runs(count: int) -> list[dict[str, Any]]:
    states = []
    for _ in range(count):
        trainer = make_trainer({"pp": 2}, max_steps=2)
        trainer.fit(Blocks(), loader(numbered_rows(8), 4))
        del trainer
        states.append(state())
    return [
        {
            **{name: each[name] for name in ("rss", "fds", "threads", "groups")},
            "changed": each["environment"] != states[0]["environment"]
            or each["cuda"] is not states[0]["cuda"],
        }
        for each in states
    ]


@pytest.mark.slow
def test_many_trainers_in_one_process_leave_nothing_behind():
    for states in run_ranks(many_runs, 2, 30 if FULL else 8):
        first, last = states[2], states[-1]
        assert not any(each["changed"] for each in states)
        assert last["threads"] <= first["threads"], states
        assert last["groups"] <= first["groups"], states
        assert last["fds"] <= first["fds"], states
