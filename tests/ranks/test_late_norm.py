"""Gradient norms that are read when TransformerEngine's Adam is about to change a parameter.

Its torch rewrite stands in for it; tests/gpu/test_optimizers.py has the real one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from torch import nn

from lightning_mcore._mcore.late_norm import LateNorm
from lightning_mcore.errors import NonFiniteError
from lightning_mcore.testing import run_ranks
from tests.ranks.halves_adam import give_norms_as_tensors, use_in_engine
from tests.ranks.test_nonfinite import BAD_STEP, outcome
from tests.ranks.trainers import loader, make_trainer, numbered_rows

CASES = [
    ("pp2", "loss", "skip"),
    ("pp2", "gradient", "error"),
    ("dp2", "gradient", "skip"),
    ("dp2", "loss", "error"),
    ("dp2", "gradient", "warn"),
    ("dp2", "clipped", "skip"),
]
READ_AT_ONCE = CASES[-2:]
"""A step that may go on clips by the norm as it is, and one that clips by value needs it first."""


class Small(L.LightningModule):
    """Of its one parameter the distributed optimizer gives a second rank nothing.

    Of its six gradients one is not finite in the very first step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(6, 1, bias=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 0:
            self.factor = torch.tensor([[1.0, 1.0, float("inf"), 1.0, 1.0, 1.0]])
            self.model.weight.register_hook(lambda grad: grad * self.factor)
        else:
            self.factor = torch.ones(1)
        return (self.model(batch["x"]) - batch["y"]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Counts(L.Callback):
    """The optimizers' counts of steps at the end, however it came."""

    steps: list[int]

    def on_train_end(self, trainer, module) -> None:
        groups = trainer.strategy._model_run.optimizer.engine.param_groups
        self.steps = [group.get("step", 0) for group in groups]

    def on_exception(self, trainer, module, exception) -> None:
        self.on_train_end(trainer, module)


def train_small(policy: str) -> Any:
    torch.manual_seed(0)
    module, counts = Small(), Counts()
    before = module.model.weight.detach().clone()
    trainer = make_trainer(
        {"use_distributed_optimizer": True, "nonfinite": policy},
        max_steps=3,
        gradient_clip_val=0.5,
        callbacks=[counts],
    )
    error = None
    try:
        trainer.fit(module, loader(numbered_rows(24), 2))
    except NonFiniteError as raised:
        error = str(raised)
    return before, module.model.weight.detach().clone(), error, counts.steps


@contextmanager
def reading(*, late: bool) -> Iterator[list[str]]:
    """Lets norms be read late where they can be, or never; notes those that are."""
    calls: list[str] = []
    expect = LateNorm.expect

    def counted(self: Any, *args: Any) -> Any:
        calls.append("late")
        return expect(self, *args)

    with (
        mock.patch.object(LateNorm, "expect", counted),
        mock.patch.object(LateNorm, "of", LateNorm.of if late else lambda *_: None),
    ):
        yield calls


def both_ways() -> Any:
    use_in_engine()
    if not give_norms_as_tensors():
        return None
    found = []
    for late in (True, False):
        with reading(late=late) as calls:
            results, counts = [], []
            for case in CASES:
                results.append(outcome(*case, gradient_clip_val=0.5))
                counts.append(len(calls))
                calls.clear()
            small = [train_small(policy) for policy in ("skip", "error")]
        found.append((results, counts, small, len(calls)))
    return found


@pytest.fixture(scope="module")
def ranks() -> Any:
    found = run_ranks(both_ways, 2, timeout_s=200)
    if found[0] is None:
        pytest.skip("this engine reads gradient norms itself")
    return found


def test_the_same_as_read_at_once(ranks):
    """Weights, logs, warnings and errors, to the bit."""
    for (late, counts, _, _), (at_once, none, _, _) in ranks:
        assert none == [0] * len(CASES)
        for case, seen, expected, count in zip(CASES, late, at_once, counts, strict=True):
            steps = BAD_STEP + 1 if case[2] == "error" else 6
            assert count == (0 if case in READ_AT_ONCE else steps), case
            for name in ("error", "lrs", "warnings", "skipped", "spikes"):
                assert repr(seen[name]) == repr(expected[name]), (case, name)
            for step, (mine, theirs) in enumerate(
                zip(seen["weights"], expected["weights"], strict=True)
            ):
                for name in mine:
                    torch.testing.assert_close(
                        mine[name], theirs[name], rtol=0, atol=0, equal_nan=True, msg=(case, step)
                    )
            assert len(seen["logged"]) == len(expected["logged"])
            for mine, theirs in zip(seen["logged"], expected["logged"], strict=True):
                assert mine == pytest.approx(theirs, rel=0, abs=0, nan_ok=True), case


def test_what_a_bad_step_leaves_as_it_was(ranks):
    for (late, _, _, _), _ in ranks:
        for (_, _, policy), seen in zip(CASES, late, strict=True):
            if policy == "warn":
                continue
            before, after = seen["weights"][BAD_STEP - 1], seen["weights"][BAD_STEP]
            assert all(torch.equal(before[name], after[name]) for name in before)


def test_where_a_rank_has_no_parameters_all_read_at_once(ranks):
    """It would launch no kernel before it joins the gathering of parameters."""
    for (_, _, small, late), (_, _, expected, _) in ranks:
        assert late == 0
        for seen, same, policy in zip(small, expected, ("skip", "error"), strict=True):
            before, after, error, counts = seen
            assert torch.equal(after, same[1]), policy
            assert torch.equal(before, after) == (policy == "error")
            assert error == same[2]
            assert (error is None) == (policy == "skip")
            assert counts == same[3] == [0 if policy == "error" else 2]
