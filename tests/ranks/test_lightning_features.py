"""Lightning's own callbacks and Trainer flags under layouts with stages and shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    DeviceStatsMonitor,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    RichProgressBar,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger

from lightning_mcore.testing import run_ranks
from tests.ranks.trainers import SIZES, Blocks, Recorder, dp_of, loader, make_trainer, numbered_rows
from tests.ranks.trainers import ranks_of as ranks

LAYOUTS = ["dp2", "pp2", "pp2vpp2", "dp2pp2"]


class Worsening(Blocks):
    """Its validation metric is best in the second epoch, so that training stops early."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def on_validation_epoch_end(self) -> None:
        epoch = self.trainer.current_epoch
        self.log("score", float(abs(epoch - 1)))


def with_callbacks(layout: str, folder: str) -> tuple[int, list[str], str, set[str]]:
    best = ModelCheckpoint(
        str(Path(folder) / "kept"),
        monitor="score",
        save_top_k=2,
        save_last=True,
        filename="{epoch}",
    )
    trainer = make_trainer(
        {**SIZES[layout], "micro_batch_size": 2},
        max_epochs=8,
        enable_checkpointing=True,
        enable_progress_bar=True,
        log_every_n_steps=1,
        num_sanity_val_steps=1,
        logger=CSVLogger(folder),
        callbacks=[
            best,
            EarlyStopping("score", patience=1),
            LearningRateMonitor("step"),
            RichProgressBar(),
            DeviceStatsMonitor(cpu_stats=True),
            Timer(duration="00:00:10:00"),
        ],
    )
    rows = numbered_rows(16)
    batch = 8 // dp_of(layout)
    trainer.fit(Worsening(), loader(rows, batch), loader(rows, batch))
    kept = sorted(path.name for path in (Path(folder) / "kept").iterdir())
    return trainer.current_epoch, kept, Path(best.best_model_path).name, set(trainer.logged_metrics)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_callbacks_act_alike_on_every_rank(layout, tmp_path):
    results = run_ranks(with_callbacks, ranks(layout), layout, str(tmp_path))
    for epochs, kept, best, logged in results:
        assert epochs == 3, "stopped after the first epoch without a better score"
        assert kept == ["epoch=0.ckpt", "epoch=1.ckpt", "last.ckpt"]
        assert best == "epoch=1.ckpt"
        assert {"score", "train_loss", "val_loss"} <= logged
    lines = next(tmp_path.rglob("metrics.csv")).read_text().splitlines()
    assert sum("train_loss" in line for line in lines) == 1, "one header: one rank writes"
    assert "lr-AdamW" in lines[0]


FLAGS: dict[str, dict[str, Any]] = {
    "limits": {"limit_train_batches": 2, "limit_val_batches": 1, "val_check_interval": 1},
    "fast_dev_run": {"fast_dev_run": 2},
    "overfit": {"overfit_batches": 1},
    "anomaly": {"detect_anomaly": True},
    "deterministic": {"deterministic": True},
    "max_time": {"max_time": "00:00:10:00"},
    "reload": {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 2},
}
STEPS = {"limits": 2, "fast_dev_run": 2, "overfit": 1, "reload": 6}


def with_flag(layout: str, flag: str) -> tuple[int, list[float]]:
    seen = Recorder()
    trainer = make_trainer(
        {**SIZES[layout], "micro_batch_size": 2}, callbacks=[seen], **FLAGS[flag]
    )
    rows = numbered_rows(24)
    batch = 8 // dp_of(layout)
    trainer.fit(Blocks(), loader(rows, batch), loader(rows, batch))
    return trainer.global_step, seen.losses


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("layout", ["pp2vpp2", "dp2pp2"])
def test_trainer_flags(layout, flag):
    results = run_ranks(with_flag, ranks(layout), layout, flag)
    assert all(result == results[0] for result in results)
    steps, losses = results[0]
    assert steps == len(losses) == STEPS.get(flag, 3)
