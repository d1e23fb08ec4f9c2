"""``accumulate_grad_batches`` sums gradients as Lightning does, up to the short last one."""

from itertools import chain

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_mcore.testing import run_ranks
from tests.ranks.trainers import (
    SIZES,
    Blocks,
    NumberedGPT,
    Recorder,
    block_weights,
    dp_of,
    joined,
    loader,
    make_blocks,
    make_trainer,
    numbered_rows,
    numbered_tokens,
    ranks_of,
    train_plainly,
    weights_of,
)

BATCHES, SAMPLES = 5, 4
"""Batches of an epoch: with accumulation over 2 or 3 the last step has fewer."""


class Calls(L.Callback):
    """When the optimizer stepped and gradients were cleared."""

    def __init__(self):
        self.steps, self.batches = [], 0

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.batches += 1

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.steps.append(self.batches)


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def adamw(module):
    return torch.optim.AdamW(module.parameters(), lr=0.01)


def fit(layout, make_optimizer, accumulate, strategy):
    recorder, calls, module = Recorder(), Calls(), Blocks(make_optimizer)
    callbacks = [recorder, calls]
    if isinstance(accumulate, dict):
        callbacks.append(GradientAccumulationScheduler(accumulate))
        accumulate = 1
    trainer = make_trainer(
        {**SIZES[layout], **strategy},
        callbacks=callbacks,
        accumulate_grad_batches=accumulate,
        max_epochs=2,
    )
    trainer.fit(module, loader(numbered_rows(BATCHES * SAMPLES * dp_of(layout)), SAMPLES))
    return {
        "ids": recorder.ids,
        "weights": block_weights(module),
        "steps": calls.steps,
        "global_step": trainer.global_step,
    }


STEPS = {
    1: [[0], [1], [2], [3], [4], [5], [6], [7], [8], [9]],
    2: [[0, 1], [2, 3], [4], [5, 6], [7, 8], [9]],
    3: [[0, 1, 2], [3, 4], [5, 6, 7], [8, 9]],
}
"""Batches of each step in two epochs of five."""


def assert_like_torch(ranks, layout, make_optimizer, steps, divisor):
    replicas = list({tuple(rank["ids"][0]): rank["ids"] for rank in ranks}.values())
    assert len(replicas) == dp_of(layout)
    batches = [[list(chain(*(ids[i] for ids in replicas))) for i in step] for step in steps]
    data = numbered_rows(BATCHES * SAMPLES * dp_of(layout))
    # The divisor stays that of a full accumulation in the short last one, as in Lightning.
    expected, _ = train_plainly(data, batches, make_optimizer, divisor=divisor)
    weights = joined([rank["weights"] for rank in ranks])
    start = block_weights(make_blocks())
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=2e-6, msg=name)
        assert not torch.allclose(value, start[name], atol=1e-4)
    for rank in ranks:
        assert rank["steps"] == [step[-1] + 1 for step in steps]
        assert rank["global_step"] == len(steps)


CASES = [
    ("dp2", sgd, {}),
    ("dp2", sgd, {"overlap_grad_reduce": True}),
    ("dp2", adamw, {"overlap_grad_reduce": True, "use_distributed_optimizer": True}),
    ("dp2", sgd, {"overlap_grad_reduce": True, "micro_batch_size": 2}),
    ("pp2", sgd, {}),
    ("pp2vpp2", sgd, {}),
    ("dp2pp2", adamw, {"overlap_grad_reduce": True}),
]


@pytest.mark.parametrize("accumulate", [2, 3])
@pytest.mark.parametrize(("layout", "make_optimizer", "strategy"), CASES)
def test_accumulation_equals_lightnings(layout, make_optimizer, strategy, accumulate):
    ranks = run_ranks(fit, ranks_of(layout), layout, make_optimizer, accumulate, strategy)
    assert_like_torch(ranks, layout, make_optimizer, STEPS[accumulate], accumulate)


def test_interleaved_replicas_with_overlap():
    layout = {"pp": 2, "vpp": 2, "overlap_grad_reduce": True}
    ranks = run_ranks(fit, 4, "dp2pp2", sgd, 2, layout)
    assert_like_torch(ranks, "dp2pp2", sgd, STEPS[2], 2)


def fit_gpt(layout, strategy, batch_size, accumulate):
    """Two steps over the same samples, in batches of this size."""
    recorder, module = Recorder(), NumberedGPT(optimizer="SGD", lr=0.5)
    trainer = make_trainer(
        {**SIZES[layout], **strategy, "micro_batch_size": 2},
        callbacks=[recorder],
        accumulate_grad_batches=accumulate,
    )
    trainer.fit(module, loader(numbered_tokens(16 * dp_of(layout)), batch_size))
    return weights_of(module), recorder.grad_norms[-1], trainer.global_step


@pytest.mark.parametrize("layout", ["dp2", "tp2pp2", "dp2pp2"])
def test_accumulated_batches_equal_one_large_batch(layout, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "5")
    overlap = {"overlap_grad_reduce": True} if dp_of(layout) > 1 else {}
    split = run_ranks(fit_gpt, ranks_of(layout), layout, overlap, 4, 2)
    whole = run_ranks(fit_gpt, ranks_of(layout), layout, overlap, 8, 1)
    for (weights, norm, steps), (expected, expected_norm, _) in zip(split, whole, strict=True):
        assert steps == 2
        assert norm == pytest.approx(expected_norm, rel=1e-4)
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=2e-6)


def test_a_schedule_of_accumulation():
    """One batch per step in the first epoch, then three."""
    ranks = run_ranks(fit, 2, "pp2", sgd, {0: 1, 1: 3}, {})
    for rank in ranks:
        assert rank["steps"] == [1, 2, 3, 4, 5, 8, 10]
    replicas = [rank["ids"] for rank in ranks]
    assert replicas[0] == replicas[1]
