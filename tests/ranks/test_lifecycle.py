"""From a Trainer's start to its teardown, several times in one process."""

import gc
import logging
import os
import weakref

import pytest
import torch
import torch.distributed as dist

from lightning_mcore.errors import NotInitializedError
from lightning_mcore.testing import run_ranks
from tests.ranks.trainers import (
    SIZES,
    Blocks,
    NumberedGPT,
    Recorder,
    loader,
    make_trainer,
    numbered_rows,
    numbered_tokens,
)

STRATEGIES = SIZES | {
    name: {"ep": 2, "micro_batch_size": 1, "moe_dispatcher": name}
    for name in ("alltoall", "allgather")
}


class KeepsGraph(NumberedGPT):
    """Keeps the latest loss with its autograd graph, as users do by mistake."""

    def training_step(self, batch, batch_idx):
        self.latest = super().training_step(batch, batch_idx)
        return self.latest


def fit_once(layout, module):
    """What a Trainer saw, and weak references to what must not outlive it."""
    original = torch.Tensor.cuda, torch.Tensor.type
    recorder = Recorder()
    trainer = make_trainer(STRATEGIES[layout], callbacks=[recorder])
    trainer.fit(module, loader(numbered_tokens(4) * 4, 4))
    strategy = trainer.strategy
    sizes, switches, run = strategy.layout, strategy.switches, strategy._run
    seen = {
        "sizes": (sizes.tp, sizes.pp, sizes.vpp, sizes.dp),
        "steps": len(recorder.losses),
        "fell": recorder.losses[-1] < recorder.losses[0],
        "restored": (torch.Tensor.cuda, torch.Tensor.type) == original,
        "groups": len(dist.distributed_c10d._world.pg_map),
        "world": dist.get_world_size(),
        "sharded": switches.use_distributed_optimizer.effective,
        "overlap": switches.overlap_grad_reduce.effective,
    }
    mortal = {
        "Trainer": trainer,
        "LightningModule": module,
        "optimizer": run.optimizer.engine,
        "DDP": run.chunks[0],
        "gradient buffer": run.chunks[0].buffers[0],
        "parameter": next(module.parameters()),
    }
    return seen, {name: weakref.ref(value) for name, value in mortal.items()}


def fit_in_turn(layouts, make_modules=(NumberedGPT,), collections=1):
    """One Trainer after the other; what each saw and left behind."""
    results = []
    for make_module in make_modules:
        for layout in layouts:
            seen, references = fit_once(layout, make_module())
            for _ in range(collections):
                gc.collect()
            seen["alive"] = [name for name, value in references.items() if value() is not None]
            seen["files"] = len(os.listdir("/proc/self/fd"))
            results.append(seen)
    return results


def test_trainers_of_different_layouts_one_after_the_other():
    layouts = ["tp2", "pp2vpp2", "dp2", "pp2", "tp2"]
    expected = [(2, 1, None, 1), (1, 2, 2, 1), (1, 1, None, 2), (1, 2, None, 1), (2, 1, None, 1)]
    for seen in run_ranks(fit_in_turn, 2, layouts):
        assert [s["sizes"] for s in seen] == expected
        assert [s["steps"] for s in seen] == [4, 4, 2, 4, 4]
        for each in seen:
            assert each["fell"]
            assert each["restored"]
            assert each["world"] == 2
            assert each["alive"] == []


def test_groups_of_earlier_trainers_are_released():
    """Groups outlive a fit, for checkpoints, but not the next Trainer's start."""
    for seen in run_ranks(fit_in_turn, 2, ["pp2", "pp2", "tp2", "pp2"]):
        counts = [each["groups"] for each in seen]
        assert counts[0] > 1
        assert counts[1] == counts[3] == counts[0]


class Experts(NumberedGPT):
    """Dispatchers keep the graph of their last microbatch."""

    def __init__(self):
        super().__init__(experts=4)


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_runs_of_experts_are_freed(dispatcher):
    for first, second in run_ranks(fit_in_turn, 2, [dispatcher] * 2, (Experts,)):
        assert first["alive"] == second["alive"] == []
        assert abs(second["files"] - first["files"]) < 40  # the groups of one run take about 80


def test_runs_are_freed_where_the_user_keeps_a_graph():
    """A graph holds the engine's hooks; what it held is freed by a second collection."""
    modules = (NumberedGPT, KeepsGraph, KeepsGraph)
    for seen in run_ranks(fit_in_turn, 2, ["dp2"], modules, 2):
        assert all(each["sharded"] and each["overlap"] for each in seen)
        assert [each["alive"] for each in seen] == [[]] * 3
        # The groups of one run take about 80 files.
        files = [each["files"] for each in seen]
        assert max(files) - min(files) < 40


class BytesHeld(Recorder):
    """Saves in the middle; notes the bytes of all tensors when training starts and ends."""

    def __init__(self, path):
        super().__init__()
        self.path, self.held = path, []

    def on_train_start(self, trainer, module):
        self.held.append(bytes_of_tensors(gc.get_objects()))

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.path)
        if trainer.global_step == 3:  # rather than before the first step that finds it written
            trainer.strategy.finish_save()

    def on_train_end(self, trainer, module):
        self.held.append(bytes_of_tensors(gc.get_objects()))


def bytes_of_tensors(objects):
    """In the storages of all tensors among some objects, each counted once."""
    tensors = [each for each in objects if type(each) in (torch.Tensor, torch.nn.Parameter)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def fit_noting_bytes(path, background):
    """One fit, and all of it that the user had in hand."""
    recorder, module = BytesHeld(path), NumberedGPT()
    options = {"use_distributed_optimizer": True, "async_save": background}
    trainer = make_trainer(options, precision="bf16-mixed", callbacks=[recorder])
    trainer.fit(module, loader(numbered_tokens(4) * 8, 4))
    return trainer, module, recorder


def fit_and_keep(folder, kept_of):
    """Fits of which some are kept: the bytes held in each, and those of a model's weights."""
    kept, held = [], []
    for number, keeps in enumerate(kept_of):
        fit = fit_noting_bytes(f"{folder}/{number}.ckpt", background=number in (1, 2))
        held.append(fit[2].held)
        weights = bytes_of_tensors(fit[1].parameters())
        if keeps:
            kept.append(fit)
        del fit
    trainer, _, recorder = kept[0]
    strategy = trainer.strategy
    for use in (lambda: trainer.save_checkpoint(folder), lambda: strategy.groups):
        with pytest.raises(NotInitializedError, match="another Trainer of this process"):
            use()
    assert strategy.step_stats.grad_norm == recorder.grad_norms[-1]
    assert strategy.skipped_steps == 0
    assert strategy.expert_switches is not None
    return held, weights


def test_runs_hand_back_their_memory_when_the_next_one_starts(tmp_path):
    """What the user keeps of a fit holds its weights, and not the state of its training.

    With or without saves in the background, of which nothing is left either.
    """
    kept_of = [True, True, True, False, False]
    for held, weights in run_ranks(fit_and_keep, 2, str(tmp_path), kept_of):
        (start, end), *later = held
        assert end > start > 3 * weights, "bf16 weights with fp32 gradients and main parameters"
        for number, (start_then, end_then) in enumerate(later, 1):
            of_kept = sum(kept_of[:number]) * weights
            # Less than the least part of a rank's training state: half of a copy of the weights.
            assert abs(start_then - start - of_kept) < weights / 2
            assert abs(end_then - end - of_kept) < weights / 2


class Peeking(Blocks):
    """Looks at the strategy at different times."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def configure_model(self):
        super().configure_model()
        strategy = self.trainer.strategy
        self.seen["layout"] = (strategy.layout.pp, strategy.layout.dp)
        self.seen["groups"] = {
            name: dist.get_process_group_ranks(getattr(strategy.groups, name))
            for name in ("tp", "pp", "dp", "mp", "world_cpu")
        }
        self.seen["early stats"] = strategy.step_stats

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen["norm"] = self.trainer.strategy.step_stats.grad_norm


def peek():
    trainer, module = make_trainer({"pp": 2}), Peeking()
    missing = []
    for name in ("layout", "groups", "switches"):
        with pytest.raises(NotInitializedError, match="Trainer"):
            getattr(trainer.strategy, name)
        missing.append(name)
    trainer.fit(module, loader(numbered_rows(16), 4))
    return missing, module.seen


def test_layout_and_groups_are_public_while_they_exist():
    ranks = run_ranks(peek, 4)
    for rank, (missing, seen) in enumerate(ranks):
        assert len(missing) == 3
        assert seen["layout"] == (2, 2)
        assert seen["groups"] == {
            "tp": [rank],
            "pp": [rank % 2, rank % 2 + 2],
            "dp": [rank // 2 * 2, rank // 2 * 2 + 1],
            "mp": [rank % 2, rank % 2 + 2],
            "world_cpu": [0, 1, 2, 3],
        }
        assert seen["early stats"] is None
        assert seen["norm"] == ranks[0][1]["norm"] > 0


def fit_and_listen():
    """Log records of this rank that hold the run header, and of the first batch."""
    records = []

    class Listener(logging.Handler):
        def emit(self, record):
            records.append(record.getMessage())

    for name in ("lightning", "lightning.pytorch", "lightning.fabric", "lightning_utilities"):
        logging.getLogger(name).addHandler(Listener())
    trainer = make_trainer({"pp": 2, "micro_batch_size": 2}, accumulate_grad_batches=3)
    module, seen = Blocks(), []
    trainer.fit(module, loader(numbered_rows(48), 8), loader(numbered_rows(8), 4))
    seen.append([text for text in records if "overlap_grad_reduce" in text])
    trainer.validate(module, loader(numbered_rows(8), 4))
    seen.append([text for text in records if "overlap_grad_reduce" in text])
    return *seen, {text for text in records if "First batch" in text}


def test_the_header_is_printed_once_and_by_rank_zero():
    (first, after_validation, batch), *others = run_ranks(fit_and_listen, 2)
    assert after_validation == first, "validate says nothing new"
    (header,) = dict.fromkeys(first)  # loggers hand records on to each other
    assert "pp 2 x dp 1 = 2 ranks on CPU" in header
    assert batch == {
        "First batch: micro_batch_size 2 x num_microbatches 4 x accumulate_grad_batches 3 x dp 1"
        " = 24 samples per optimizer step."
    }
    assert all(seen == ([], [], set()) for seen in others)


def call_outside_a_step():
    module = Blocks()
    trainer = make_trainer({"pp": 2})
    trainer.fit(module, loader(numbered_rows(8), 4))
    with pytest.raises(NotInitializedError, match=r"cut into 2 stages.*only inside training_step"):
        module.model(torch.zeros(1, 6))
    return True


def test_a_cut_model_cannot_be_called_outside_a_step():
    assert run_ranks(call_outside_a_step, 2) == [True, True]
