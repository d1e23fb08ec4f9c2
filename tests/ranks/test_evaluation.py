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

CUTS = {
    "one by one": (1, 1),
    "short last batch": (4, 2),
    "not a multiple of micro_batch_size": (5, 3),
}
"""Batch size and micro_batch_size; the last batch of 7 samples is mostly a short one."""


class CountingGPT(NumberedGPT):
    """Logs what it evaluated as well, so that a lost or repeated sample changes a value."""

    def validation_step(self, batch, batch_idx):
        self.log("samples before the call", float(len(batch["id"])), reduce_fx="sum")
        super().validation_step(batch, batch_idx)
        self.log("samples", float(len(batch["id"])), reduce_fx="sum")
        self.log("ids", batch["id"].double().sum(), reduce_fx="sum")

    def test_step(self, batch, batch_idx):
        super().test_step(batch, batch_idx)
        self.log("samples", float(len(batch["id"])), reduce_fx="sum")


def evaluate(layout):
    """Evaluates one fixed model with every cut; returns values and predictions by cut."""
    module, seen = CountingGPT(), {}
    data = numbered_tokens(PER_REPLICA * dp_of(layout))
    # Meant for training: evaluation takes batches that such groups do not fit.
    groups = {"microbatch_group_size_per_vp_stage": 4} if "vpp" in SIZES[layout] else {}
    for name, (batch_size, micro_batch_size) in CUTS.items():
        trainer = make_trainer({**SIZES[layout], **groups, "micro_batch_size": micro_batch_size})
        (validated,) = trainer.validate(module, loader(data, batch_size), verbose=False)
        (tested,) = trainer.test(module, loader(data, batch_size), verbose=False)
        predicted = trainer.predict(module, loader(data, batch_size))
        seen[name] = {
            "validated": as_floats(validated),
            "tested": as_floats(tested),
            "batches": [len(part["id"]) for part in predicted],
            "ids": [i for part in predicted for i in part["id"].tolist()],
            "losses": [v for part in predicted for v in part["loss"].tolist()],
        }
    return seen


@pytest.fixture(scope="module", params=["dp2", "pp2", "pp2vpp2", "tp2pp2", "dp2pp2"])
def evaluated(request):
    """What each rank of a layout evaluated."""
    return request.param, run_ranks(evaluate, ranks_of(request.param), request.param)


class TestEveryLayout:
    def test_predictions_are_on_every_rank_in_dataset_order(self, evaluated):
        layout, ranks = evaluated
        dp = dp_of(layout)
        for rank, cuts in enumerate(ranks):
            # Ranks with the same data-parallel rank hold the same predictions.
            dp_rank = rank // SIZES[layout].get("tp", 1) % dp
            for name, seen in cuts.items():
                assert seen["ids"] == list(range(dp_rank, PER_REPLICA * dp, dp)), name
                size = CUTS[name][0]
                sizes = [size] * (PER_REPLICA // size)
                assert seen["batches"] == sizes + [PER_REPLICA % size] * (PER_REPLICA % size > 0)

    def test_values_are_means_over_samples_whatever_the_cut(self, evaluated):
        layout, ranks = evaluated
        replicas = {tuple(cuts["one by one"]["ids"]): cuts for cuts in ranks}.values()
        assert len(replicas) == dp_of(layout)
        every = [value for cuts in replicas for value in cuts["one by one"]["losses"]]
        assert len(set(every)) > 1
        mean = sum(every) / len(every)
        for cuts in ranks:
            for name, seen in cuts.items():
                assert seen["losses"] == pytest.approx(cuts["one by one"]["losses"], abs=1e-5)
                assert seen["validated"]["val_loss"] == pytest.approx(mean, abs=1e-5), name
                assert seen["tested"]["test_loss"] == pytest.approx(mean, abs=1e-5), name

    def test_no_sample_is_lost_or_counted_twice(self, evaluated):
        layout, ranks = evaluated
        count = PER_REPLICA * dp_of(layout)
        for cuts in ranks:
            for name, seen in cuts.items():
                assert seen["validated"]["samples"] == count, name
                assert seen["validated"]["samples before the call"] == count, name
                assert seen["validated"]["ids"] == count * (count - 1) / 2, name
                assert seen["tested"]["samples"] == count, name


def fit_test_predict(layout):
    """One Trainer and one module through all loops; values that belong together."""
    module, recorder = NumberedGPT(lr=1e-3), Recorder()
    trainer = make_trainer(
        SIZES[layout],
        callbacks=[recorder],
        num_sanity_val_steps=2,
        max_steps=3,
        max_epochs=-1,
        val_check_interval=1,
    )
    dp = dp_of(layout)
    train = held_out = numbered_tokens(8 * dp)
    trainer.fit(module, loader(train, 4), loader(held_out, 3))
    (tested,) = trainer.test(module, loader(held_out, 8), verbose=False)
    predicted = trainer.predict(module, loader(held_out, 2))
    (before,) = trainer.validate(module, loader(held_out, 3), verbose=False)
    trainer.fit_loop.epoch_loop.max_steps = 6
    trainer.fit(module, loader(train, 4), loader(held_out, 3))
    (after,) = trainer.validate(module, loader(held_out, 3), verbose=False)
    return {
        "in_fit": recorder.validation,
        "tested": tested["test_loss"],
        "predicted": [v for part in predicted for v in part["loss"].tolist()],
        "before": before["val_loss"],
        "after": after["val_loss"],
        "losses": recorder.losses,
        "steps": trainer.global_step,
    }


@pytest.mark.parametrize("layout", SIZES)
def test_one_trainer_and_module_through_all_loops(layout):
    ranks = run_ranks(fit_test_predict, ranks_of(layout), layout)
    for seen in ranks:
        assert seen["tested"] == pytest.approx(seen["before"], abs=1e-5)
        if dp_of(layout) == 1:
            mean = sum(seen["predicted"]) / len(seen["predicted"])
            assert seen["tested"] == pytest.approx(mean, abs=1e-5)
        # Both fits trained: the second went on from the weights of the first.
        assert len(seen["losses"]) == seen["steps"] == 6
        assert len(seen["in_fit"]) == 6
        assert seen["after"] < seen["before"]
        assert seen["in_fit"][-1]["val_loss"] == pytest.approx(seen["after"], abs=1e-5)


def fit_with_validation(layout, overlap):
    """Validates after every second of six steps, and before the first."""
    strategy = {**SIZES[layout], "overlap_param_gather": overlap}
    recorder = Recorder()
    trainer = make_trainer(
        strategy, callbacks=[recorder], val_check_interval=2, num_sanity_val_steps=1
    )
    dp = dp_of(layout)
    torch.manual_seed(1)
    module = NumberedGPT()
    held_out = loader(numbered_tokens(4 * dp, seed=1), 2)
    trainer.fit(module, loader(numbered_tokens(24 * dp), 4), held_out)
    used = trainer.strategy.switches.overlap_param_gather.effective
    (after,) = trainer.validate(module, held_out, verbose=False)
    return used, recorder.losses, [v["val_loss"] for v in recorder.validation], after["val_loss"]


@pytest.mark.parametrize("layout", ["dp2", "dp2pp2"])
def test_validation_between_overlapped_gathers_sees_the_stepped_weights(layout, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "3")
    overlapped = run_ranks(fit_with_validation, ranks_of(layout), layout, True)
    plain = run_ranks(fit_with_validation, ranks_of(layout), layout, False)
    for (used, *with_overlap), (unused, *without) in zip(overlapped, plain, strict=True):
        assert (used, unused) == (True, False)
        for seen, expected in zip(with_overlap, without, strict=True):
            assert seen == pytest.approx(expected, abs=1e-6)
    _, losses, validated, after = overlapped[0]
    assert len(losses) == 6
    assert len(set(validated)) == 3
    assert after == pytest.approx(validated[-1], abs=1e-6)


def sanity_check_only(layout):
    """Whether sanity validation left logged values behind, and what it saw."""
    seen = []

    class Watching(NumberedGPT):
        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            seen.append(self.trainer.sanity_checking)

    recorder = Recorder()
    trainer = make_trainer(
        SIZES[layout],
        num_sanity_val_steps=2,
        limit_val_batches=3,
        limit_train_batches=1,
        callbacks=[recorder],
    )
    data = numbered_tokens(12 * dp_of(layout))
    trainer.fit(Watching(), loader(data, 4), loader(data, 2))
    return seen, len(recorder.validation), recorder.metrics


@pytest.mark.parametrize("layout", ["dp2", "pp2vpp2"])
def test_sanity_validation_runs_and_leaves_no_values(layout):
    ranks = run_ranks(sanity_check_only, ranks_of(layout), layout)
    on_last_stage = ranks[-1][0]
    assert on_last_stage.count(True) > 0
    assert on_last_stage.count(True) * 3 == on_last_stage.count(False) * 2
    for _, validations, metrics in ranks:
        assert validations == 1
        assert [set(values) for values in metrics] == [{"train_loss"}]
