"""What a step logs is the same on every rank, and the value that Lightning's rules give.

Every sample carries a number, so what a mean, sum, minimum or maximum over microbatches and
data-parallel ranks must be follows from the samplers' rule alone.
"""

import csv
from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch.utils.data import DistributedSampler

from lightning_mcore.testing import run_ranks
from tests.ranks.trainers import (
    SIZES,
    Blocks,
    NumberedGPT,
    Recorder,
    as_floats,
    dp_of,
    loader,
    make_trainer,
    numbered_rows,
    numbered_tokens,
    ranks_of,
)

STEPS, SAMPLES = 3, 4
"""Batches of an epoch, and samples in each on one data-parallel rank."""


class Logging(NumberedGPT):
    """Logs sample numbers in every way that ``self.log`` knows."""

    def training_step(self, batch, batch_idx):
        ids = batch["id"].double()
        self.log("before_call", ids.mean())
        loss = self.losses(batch).mean()
        self.log("train_loss", loss)
        self.log("both", ids.mean(), on_step=True, on_epoch=True, prog_bar=True)
        self.log("epoch_only", ids.mean(), on_step=False, on_epoch=True)
        self.log("sum", ids.sum(), on_step=True, on_epoch=True, reduce_fx="sum")
        self.log("min", ids.min(), on_step=True, on_epoch=True, reduce_fx="min")
        self.log("max", ids.max(), on_step=True, on_epoch=True, reduce_fx=torch.max)
        self.log("synced", ids.mean(), sync_dist=True, batch_size=len(ids))
        self.log("number", 2)
        self.log("positional", ids.mean(), True, None, False, True, "max")
        self.log_dict({"dict/mean": ids.mean(), "dict/loss": loss}, prog_bar=True)
        self.log_dict({"dict/epoch": ids.mean()}, on_step=False, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("hook", outputs["loss"] * 0 + self.trainer.strategy.layout.dp_rank, sync_dist=True)

    def on_train_epoch_end(self):
        own = torch.tensor(float(self.trainer.strategy.layout.dp_rank))
        self.log("epoch_hook", own, sync_dist=True, reduce_fx="max")

    def on_before_optimizer_step(self, optimizer):
        self.log("optimizer_hook", float(self.global_step))


def fit_and_log(layout):
    recorder = Recorder()
    trainer = make_trainer(SIZES[layout], callbacks=[recorder])
    trainer.fit(Logging(), loader(numbered_tokens(STEPS * SAMPLES * dp_of(layout)), SAMPLES))
    return {
        "steps": recorder.metrics,
        "losses": recorder.losses,
        "epoch": as_floats(trainer.callback_metrics),
        "bar": sorted(trainer.progress_bar_metrics),
    }


@pytest.fixture(scope="module", params=list(SIZES))
def logged(request):
    """One epoch under each layout: what every rank saw."""
    return request.param, run_ranks(fit_and_log, ranks_of(request.param), request.param)


def ids_of_step(layout, step):
    """Sample numbers of each data-parallel rank in one step: Lightning shuffles with seed 0."""
    return [
        list(DistributedSampler(range(STEPS * SAMPLES * dp_of(layout)), dp_of(layout), rank))[
            step * SAMPLES : (step + 1) * SAMPLES
        ]
        for rank in range(dp_of(layout))
    ]


def flat(rows):
    return [value for row in rows for value in row]


def mean(values):
    return sum(values) / len(values)


class TestEveryLayout:
    def test_all_ranks_hold_the_same_metrics(self, logged):
        _, ranks = logged
        assert len(ranks[0]["steps"]) == STEPS
        for rank in ranks[1:]:
            assert rank == ranks[0]

    def test_step_values_are_those_of_all_microbatches_and_replicas(self, logged):
        layout, ranks = logged
        for step, seen in enumerate(ranks[0]["steps"]):
            ids = flat(ids_of_step(layout, step))
            for name in ("before_call", "both", "both_step", "synced", "dict/mean"):
                assert seen[name] == pytest.approx(mean(ids)), name
            assert seen["sum_step"] == sum(ids)
            assert seen["min_step"] == min(ids)
            assert seen["max_step"] == max(ids)
            assert seen["number"] == 2
            assert seen["optimizer_hook"] == step

    def test_epoch_values_follow_their_reduction(self, logged):
        layout, ranks = logged
        ids = flat(flat(ids_of_step(layout, step)) for step in range(STEPS))
        seen = ranks[0]["epoch"]
        for name in ("both_epoch", "epoch_only", "dict/epoch"):
            assert seen[name] == pytest.approx(mean(ids)), name
        assert seen["sum_epoch"] == sum(ids)
        assert seen["min_epoch"] == min(ids)
        assert seen["max_epoch"] == max(ids)
        assert "epoch_only" not in ranks[0]["steps"][0]

    def test_positional_arguments_arrive(self, logged):
        """``positional`` is on the epoch only, with the maximum over all microbatches' means."""
        layout, ranks = logged
        size = 1 if SIZES[layout].get("pp", 1) > 1 else SAMPLES
        rows = flat(ids_of_step(layout, step) for step in range(STEPS))
        means = [mean(row[i : i + size]) for row in rows for i in range(0, SAMPLES, size)]
        assert "positional" not in ranks[0]["steps"][0]
        assert ranks[0]["epoch"]["positional"] == max(means)

    def test_the_progress_bar_shows_what_was_asked(self, logged):
        _, ranks = logged
        shown = set(ranks[0]["bar"]) - {"v_num"}
        assert {"dict/loss", "dict/mean", "positional"} <= shown
        assert any(name.startswith("both") for name in shown)
        assert not shown & {"train_loss", "sum", "number", "before_call"}

    def test_the_step_output_is_the_logged_loss(self, logged):
        _, ranks = logged
        for loss, seen in zip(ranks[0]["losses"], ranks[0]["steps"], strict=True):
            assert seen["train_loss"] == loss
            assert seen["dict/loss"] == loss
            assert loss > 1.0

    def test_hooks_reduce_over_replicas_only(self, logged):
        layout, ranks = logged
        last = dp_of(layout) - 1
        assert ranks[0]["steps"][-1]["hook"] == last / 2
        assert ranks[0]["epoch"]["epoch_hook"] == last


def losses_with_frozen_weights(layout):
    """Training losses with learning rate 0, and each sample's loss from ``predict``."""
    module, recorder = NumberedGPT(lr=0.0), Recorder()
    data = numbered_tokens(STEPS * SAMPLES * dp_of(layout))
    # Another cut of the data than the training batches': the two ways share no arithmetic.
    trainer = make_trainer({**SIZES[layout], "micro_batch_size": 2}, callbacks=[recorder])
    trainer.fit(module, loader(data, SAMPLES))
    parts = trainer.predict(module, loader(data, 3))
    by_id = {int(i): float(v) for p in parts for i, v in zip(p["id"], p["loss"], strict=True)}
    return recorder.losses, recorder.ids, by_id


@pytest.mark.parametrize("layout", SIZES)
def test_train_loss_is_the_mean_over_microbatches_and_replicas(layout):
    ranks = run_ranks(losses_with_frozen_weights, ranks_of(layout), layout)
    by_id = {key: value for _, _, part in ranks for key, value in part.items()}
    assert len(by_id) == STEPS * SAMPLES * dp_of(layout)
    for losses, _, _ in ranks:
        for step, loss in enumerate(losses):
            ids = flat(ids_of_step(layout, step))
            assert loss == pytest.approx(mean([by_id[i] for i in ids]), abs=1e-5)
    assert len(set(ranks[0][0])) == STEPS  # the batches differ, so a stuck value would show


class Uneven(Blocks):
    """Logs other keys on other ranks, steps and microbatches."""

    def training_step(self, batch, batch_idx):
        layout, ids = self.trainer.strategy.layout, batch["id"].double()
        self.log(f"stage{layout.pp_rank}", ids.mean())
        loss = self.losses(batch).mean()
        self.log(f"dp{layout.dp_rank}", ids.mean())
        self.log(f"dp{layout.dp_rank}_sum", ids.sum(), reduce_fx="sum")
        self.log(f"dp{layout.dp_rank}_max", ids.max(), reduce_fx="max")
        if batch_idx % 2:
            self.log("odd_step", float(batch_idx))
        if ids.min() % 4 == 3:
            self.log("some_microbatch", ids.mean())
        return loss


def fit_uneven(layout):
    recorder = Recorder()
    trainer = make_trainer(SIZES[layout], callbacks=[recorder])
    trainer.fit(Uneven(), loader(numbered_rows(STEPS * SAMPLES * dp_of(layout)), SAMPLES))
    return recorder.metrics


@pytest.mark.parametrize("layout", ["dp2", "pp2vpp2", "dp2pp2"])
def test_keys_that_differ_between_ranks_and_steps(layout):
    ranks = run_ranks(fit_uneven, ranks_of(layout), layout)
    for rank in ranks:
        assert rank == ranks[0]
    last_stage = SIZES[layout].get("pp", 1) - 1
    some_microbatch = None
    for step, seen in enumerate(ranks[0]):
        rows = ids_of_step(layout, step)
        # Before the model call every stage logs, but the last one's entry is what counts.
        assert {name for name in seen if name.startswith("stage")} == {f"stage{last_stage}"}
        for rank, ids in enumerate(rows):
            assert seen[f"dp{rank}"] == pytest.approx(mean(ids))
            assert seen[f"dp{rank}_sum"] == sum(ids)
            assert seen[f"dp{rank}_max"] == max(ids)
        assert seen.get("odd_step") == (None if step == 0 else 1.0)
        if last_stage:  # microbatches of one sample
            logging = [i for i in flat(rows) if i % 4 == 3]
            some_microbatch = mean(logging) if logging else some_microbatch
            assert seen.get("some_microbatch") == some_microbatch
    assert last_stage == 0 or some_microbatch is not None


class TwoValidationSets(NumberedGPT):
    """Logs sample numbers under the keys of each validation loader."""

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.losses(batch)
        ids = batch["id"].double()
        self.log("ids", ids.mean())
        self.log(f"own_{dataloader_idx}", ids.max(), add_dataloader_idx=False, reduce_fx="max")
        self.log("step", ids.mean(), on_step=True, on_epoch=True)

    def on_validation_epoch_end(self):
        own = torch.tensor(float(self.trainer.strategy.layout.dp_rank))
        self.log("val_hook", own, sync_dist=True)


def validate_two_sets(layout):
    trainer = make_trainer(SIZES[layout])
    dp = dp_of(layout)
    # 3 + 3 + 1 samples and 2 samples on each replica.
    sets = [numbered_tokens(7 * dp), numbered_tokens(2 * dp)]
    (first, second) = trainer.validate(TwoValidationSets(), [loader(s, 3) for s in sets])
    return as_floats({**first, **second})


@pytest.mark.parametrize("layout", ["dp2", "pp2", "pp2vpp2", "tp2pp2", "dp2pp2"])
def test_each_validation_loader_has_its_own_keys(layout):
    ranks = run_ranks(validate_two_sets, ranks_of(layout), layout)
    dp = dp_of(layout)
    for seen in ranks:
        assert seen == ranks[0]
    # Weighted by samples: a mean over batches would weigh the short last one too much.
    assert ranks[0]["ids/dataloader_idx_0"] == pytest.approx((7 * dp - 1) / 2)
    assert ranks[0]["ids/dataloader_idx_1"] == pytest.approx((2 * dp - 1) / 2)
    assert ranks[0]["step_epoch/dataloader_idx_0"] == pytest.approx((7 * dp - 1) / 2)
    assert ranks[0]["own_0"] == 7 * dp - 1
    assert ranks[0]["own_1"] == 2 * dp - 1
    assert ranks[0]["val_hook"] == (dp - 1) / 2


def fit_with_loggers(layout, folder):
    loggers = [CSVLogger(folder, name="csv"), TensorBoardLogger(folder, name="board")]
    recorder = Recorder()
    trainer = make_trainer(SIZES[layout], logger=loggers, log_every_n_steps=1, callbacks=[recorder])
    data = numbered_rows(STEPS * SAMPLES * dp_of(layout))
    trainer.fit(Blocks(), loader(data, SAMPLES), loader(data, SAMPLES))
    return recorder.losses, as_floats(trainer.callback_metrics)["val_loss"]


def test_only_global_rank_zero_writes_logs(tmp_path):
    ranks = run_ranks(fit_with_loggers, ranks_of("dp2pp2"), "dp2pp2", str(tmp_path))
    losses, val_loss = ranks[0]
    assert [p.name for p in (tmp_path / "csv").iterdir()] == ["version_0"]
    assert [p.name for p in (tmp_path / "board").iterdir()] == ["version_0"]
    (events,) = (tmp_path / "board" / "version_0").glob("events.*")
    assert str(events).endswith(".0")
    with Path(tmp_path / "csv" / "version_0" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    written = [float(row["train_loss"]) for row in rows if row["train_loss"]]
    assert written == pytest.approx(losses, rel=1e-6)
    assert [float(r["val_loss"]) for r in rows if r["val_loss"]] == pytest.approx([val_loss])
    # Imported here, where no rank has to wait for it.
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(events)).Reload()
    assert [e.value for e in board.Scalars("train_loss")] == pytest.approx(losses, rel=1e-6)
    assert [e.step for e in board.Scalars("train_loss")] == list(range(STEPS))
