"""Saves that are written while training goes on, seen from a Trainer on real ranks."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_mcore import checkpoint_files, checkpoint_save
from lightning_mcore.checkpoint import is_checkpoint, read_manifest
from lightning_mcore.errors import CheckpointError
from lightning_mcore.stored import StoredCheckpoint
from lightning_mcore.testing import run_ranks
from tests.gpt import GPT, token_dataset
from tests.ranks.trainers import Recorder, loader, make_trainer

LAYOUTS = {"dp2": {}, "pp2": {"pp": 2, "micro_batch_size": 2}}
STEPS = 6


class Gate:
    """Stops writers before they write, until it is opened."""

    def __init__(self, point: str = "writing in the background") -> None:
        self._open = threading.Event()
        self._point = point
        checkpoint_files.fault_hook = self

    def __call__(self, point: str) -> None:
        if point == self._point:
            assert self._open.wait(60), "nobody opened the gate"

    def open(self) -> None:
        self._open.set()


class AtStep(L.Callback):
    """Calls ``actions[step](trainer)`` at the end of a step."""

    def __init__(self, **actions) -> None:
        self.actions = {int(name.removeprefix("step")): do for name, do in actions.items()}

    def on_train_batch_end(self, trainer, *_) -> None:
        if trainer.global_step in self.actions:
            self.actions[trainer.global_step](trainer)


def train(layout, *callbacks, background=True, steps=STEPS):
    L.seed_everything(3, verbose=False)
    trainer = make_trainer(
        {**LAYOUTS[layout], "async_save": background},
        max_steps=steps,
        max_epochs=-1,
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks),
        callbacks=[*callbacks, seen := Recorder()],
    )
    trainer.fit(GPT(), loader(token_dataset(48), 4 if layout == "dp2" else 8))
    return trainer, seen.losses


def content(path):
    """Everything in a checkpoint by key."""
    checkpoint = StoredCheckpoint(path)
    found = {key: checkpoint.read(key) for key in checkpoint.tensors}
    lightning = torch.load(checkpoint.lightning_file, weights_only=True)
    return found, {key: checkpoint.read_object(key) for key in checkpoint.objects}, lightning


def save_both_ways(layout, folder):
    """The same run three times: without saves, and with a save at step 2 in either way."""
    folder = Path(folder)
    _, undisturbed = train(layout)
    save = AtStep(step2=lambda trainer: trainer.save_checkpoint(folder / "now.ckpt"))
    train(layout, save, background=False)
    gate, there = Gate(), []

    def look(trainer):
        there.append((folder / "later.ckpt").exists())
        gate.open()

    later = AtStep(step2=lambda trainer: trainer.save_checkpoint(folder / "later.ckpt"), step5=look)
    _, losses = train(layout, later)
    return losses == undisturbed, there


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_snapshot_is_of_the_step_that_asked_for_it(layout, tmp_path):
    for same_losses, there in run_ranks(save_both_ways, 2, layout, str(tmp_path)):
        assert same_losses
        assert there == [False], "it was written only after step 5"
    tensors, objects, lightning = content(tmp_path / "now.ckpt")
    later = content(tmp_path / "later.ckpt")
    assert tensors.keys() == later[0].keys()
    for key, tensor in tensors.items():
        assert torch.equal(tensor, later[0][key]), key
    assert repr(objects) == repr(later[1])
    assert repr(lightning) == repr(later[2])
    assert lightning["global_step"] == 2
    names = {p.name for p in tmp_path.iterdir()}
    assert names == {"now.ckpt", "later.ckpt"}


def keep_the_latest(folder):
    """What ``ModelCheckpoint`` has on disk while a save is pending and afterwards."""
    folder = Path(folder)
    gates, seen = [], {}
    keep = ModelCheckpoint(
        folder, every_n_train_steps=2, save_top_k=1, save_last="link", filename="{step}"
    )

    def pending(trainer):
        seen["pending"] = sorted(os.listdir(folder))
        seen["last leads to"] = os.path.realpath(folder / "last.ckpt")
        seen["name is taken"] = keep.file_exists(str(folder / "step=4.ckpt"), trainer)

        def open_while_the_next_save_waits():
            gates.append(Gate())
            gates[0].open()

        threading.Timer(0.5, open_while_the_next_save_waits).start()

    def third_pending(trainer):
        seen["while the third is pending"] = sorted(p.name for p in folder.glob("*.ckpt"))
        gates[1].open()

    # Callbacks of the user come before ModelCheckpoint, which saves at the end of steps 2, 4, 6.
    steps = AtStep(step3=lambda trainer: gates.append(Gate()), step6=pending, step7=third_pending)
    trainer, _ = train("dp2", keep, steps, steps=7)
    seen["after"] = sorted(p.name for p in folder.iterdir())
    seen["best"] = keep.best_model_path
    seen["last"] = os.path.realpath(folder / "last.ckpt")
    seen["changed"] = sorted(set(vars(keep)) & {"file_exists", "_link_checkpoint"})
    trainer.save_checkpoint(folder / "after.ckpt")
    seen["after fit"] = is_checkpoint(folder / "after.ckpt")
    return seen


def test_model_checkpoint_keeps_the_old_one_until_the_new_one_is_there(tmp_path):
    for seen in run_ranks(keep_the_latest, 2, str(tmp_path)):
        aside = [name for name in seen["pending"] if name.endswith(".tmp")]
        assert len(aside) == 1
        assert sorted({*seen["pending"]} - {*aside}) == ["last.ckpt", "step=2.ckpt"]
        assert seen["last leads to"] == str(tmp_path / "step=2.ckpt")
        assert seen["name is taken"]
        names = [name for name in seen["while the third is pending"] if name[0] != "."]
        assert names == ["last.ckpt", "step=4.ckpt"], "the third save waited for the second"
        assert seen["after"] == ["last.ckpt", "step=6.ckpt"]
        assert seen["best"] == str(tmp_path / "step=6.ckpt")
        assert seen["last"] == str(tmp_path / "step=6.ckpt")
        assert seen["changed"] == []
        assert seen["after fit"], "a save after fit has nobody to finish it, so it is synchronous"


class UserError(Exception):
    """Of a callback."""


def end_early(folder, how):
    """A run that ends while a save is pending; what was raised."""
    folder = Path(folder)
    rank = int(os.environ["RANK"])
    gate = Gate()
    # The drain has to wait for the writers.
    timer = threading.Timer(1.0, gate.open)

    def end(trainer):
        timer.start()
        if how == "SIGTERM" and rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if how == "all" or (how == "one" and rank == 1):
            raise UserError("stop")

    steps = AtStep(step2=lambda trainer: trainer.save_checkpoint(folder / f"{how}.ckpt"), step3=end)
    try:
        train("dp2", steps)
    except (Exception, SystemExit) as error:
        return type(error).__name__
    return None


@pytest.mark.parametrize(
    ("how", "raised"),
    [
        ("all", {"UserError"}),
        ("one", {"UserError", "RankFailed"}),
        ("SIGTERM", {"SIGTERMException"}),
        ("end", {None}),
    ],
)
def test_a_pending_save_is_completed_when_training_ends(how, raised, tmp_path):
    results = run_ranks(end_early, 2, str(tmp_path), how)
    assert set(results) == raised
    assert read_manifest(tmp_path / f"{how}.ckpt")["global_step"] == 2
    assert [p.name for p in tmp_path.iterdir()] == [f"{how}.ckpt"]


def fail_to_write(folder, end):
    """Rank 1's disk is full in the second save: what each rank raises, and when."""
    folder = Path(folder)
    real, steps_done = os.fsync, []

    def fsync(descriptor):
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".distcp"):
            raise OSError(28, "No space left on device")
        real(descriptor)

    def break_disk(trainer):
        trainer.strategy.finish_save()
        if trainer.global_rank == 1:
            os.fsync = fsync

    keep = ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=1, filename="{step}")
    count = AtStep(**{f"step{n}": lambda t: steps_done.append(t.global_step) for n in (5, 6, 7)})
    checkpoint_save.PATIENCE_S = 1.0
    try:
        train("dp2", AtStep(step3=break_disk), keep, count, steps=4 if end else 8)
    except CheckpointError as error:
        return str(error), steps_done
    finally:
        os.fsync = real
    return None


@pytest.mark.parametrize("end", [False, True], ids=["next step", "end of fit"])
def test_a_failure_is_raised_once_on_all_ranks_and_the_old_checkpoint_stays(end, tmp_path):
    (first, steps), (second, _) = run_ranks(fail_to_write, 2, str(tmp_path), end)
    assert first == second
    assert "step=4.ckpt` was not saved: writing shards failed on rank 1: OSError" in first
    assert "No space left on device" in first
    # A step may start before the writer has failed, but the next save cannot.
    assert steps in ([], [5])
    assert read_manifest(tmp_path / "step=2.ckpt")["global_step"] == 2
    assert [p.name for p in tmp_path.iterdir()] == ["step=2.ckpt"]
