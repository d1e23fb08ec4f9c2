"""The losses of multi-token prediction in the log; tests/parity/test_token_prediction.py trains."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from lightning_mcore.callbacks import MTPLosses
from lightning_mcore.testing import run_ranks
from tests.gpt import GPT, token_dataset
from tests.parity.layouts import InOrder
from tests.parity.test_token_prediction import AnyGPT
from tests.ranks.trainers import make_trainer, refused

STEPS, BATCH, MICRO_BATCH = 4, 8, 2
DEPTH = 2
"""Further tokens."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2": {"tp": 2},
    "pp2vpp2": {"pp": 2, "vpp": 2},
}


class Engine(L.Callback):
    """The engine's own sums, before they are taken, over the microbatches: means on one rank."""

    def __init__(self) -> None:
        self.means: list[list[float]] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        tracker = MTPLossLoggingHelper.tracker
        values = tracker.get("loss_values", tracker.get("values"))
        if values is None:  # on an earlier stage
            return
        self.means.append((values * MICRO_BATCH / BATCH).tolist())


class Record(L.Callback):
    """Loss, gradient norm and the losses of further tokens of every step."""

    def __init__(self) -> None:
        self.steps: list[list[float]] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        logged = trainer.callback_metrics
        further = [float(logged[f"mtp/loss_{k + 1}"]) for k in range(DEPTH)]
        norm = float(trainer.strategy.step_stats.grad_norm)
        self.steps.append([float(outputs["loss"]), norm, *further])


def fit(
    strategy: Mapping[str, Any],
    module: GPT,
    *callbacks: L.Callback,
    replicas: int = 1,
    steps: int = STEPS,
    path: Path | None = None,
) -> L.Trainer:
    trainer = make_trainer(
        {"micro_batch_size": MICRO_BATCH, **strategy},
        callbacks=[*callbacks],
        max_steps=steps,
        max_epochs=-1,
    )
    data = InOrder(token_dataset(BATCH * STEPS), BATCH // replicas)
    trainer.fit(module, datamodule=data, ckpt_path=path)
    return trainer


def resumed(strategy: Mapping[str, Any], path: Path, replicas: int = 1) -> Any:
    engine, record = Engine(), Record()
    callbacks = engine, MTPLosses(every_n_steps=1), record
    fit(strategy, AnyGPT(depth=DEPTH), *callbacks, replicas=replicas, path=path)
    return record.steps, engine.means


def one_rank(path: Path) -> Any:
    fit({}, AnyGPT(depth=DEPTH), steps=1).save_checkpoint(path)
    return resumed({}, path)


def two_ranks(path: Path) -> Any:
    found = {
        layout: resumed(sizes, path, 2 if layout == "dp2" else 1)[0]
        for layout, sizes in LAYOUTS.items()
    }
    return found, refused(lambda: fit({"pp": 2}, GPT(), MTPLosses()))


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Any:
    path = tmp_path_factory.mktemp("mtp") / "one.ckpt"
    (one,) = run_ranks(one_rank, 1, path, timeout_s=60)
    return one, run_ranks(two_ranks, 2, path, timeout_s=120)


def test_losses_are_the_engines_means(runs):
    steps, means = runs[0]
    assert len(steps) == STEPS - 1
    assert [step[2:] for step in steps] == [pytest.approx(mean, rel=1e-6) for mean in means]
    assert all(3.0 < loss < 5.0 for step in steps for loss in step[2:]), "log(64) is 4.16"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_logs_the_same(runs, layout):
    (expected, _), several = runs
    for found, _ in several:
        torch.testing.assert_close(
            torch.tensor(found[layout]), torch.tensor(expected), rtol=1e-5, atol=0.0
        )


def test_a_model_that_predicts_one_token_has_none(runs):
    for _, message in runs[1]:
        assert "`MTPLosses` needs a model that predicts several tokens" in message
