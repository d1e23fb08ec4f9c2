"""A LightningModule without Megatron layers against Lightning's own strategies."""

from __future__ import annotations

import functools
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.nn import functional

from lightning_mcore import MCoreStrategy
from lightning_mcore.testing import run_ranks
from tests.parity.layouts import Outcome, check_batches, check_steps, fit
from tests.parity.one_process import Reference
from tests.parity.recipes import OPTIMIZERS, Training, make_schedule

FEATURES, CLASSES = 12, 5


class Plain(L.LightningModule):
    """A few torch layers; ``step`` sees them as attributes, not through one call."""

    def __init__(self, training: Training, norm: str) -> None:
        super().__init__()
        self.training_plan = training
        self.first = nn.Linear(FEATURES, 24)
        self.norm = nn.LayerNorm(24) if norm == "layer" else nn.BatchNorm1d(24)
        self.second = nn.Linear(24, CLASSES)
        self.scale = nn.Parameter(torch.ones(()))
        self.norms: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, classes = batch
        hidden = functional.gelu(self.norm(self.first(inputs)))
        loss = functional.cross_entropy(self.scale * self.second(hidden), classes)
        self.log("train_loss", loss)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if isinstance(self.trainer.strategy, MCoreStrategy):
            return  # With the distributed optimizer a rank does not hold the whole gradient.
        grads = [p.grad.float().norm() for p in self.parameters() if p.grad is not None]
        self.norms.append(torch.stack(grads).norm().item())

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS[self.training_plan.optimizer](self.named_parameters())
        schedule = {"scheduler": make_schedule(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def make_data(samples: int) -> list[tuple[Tensor, Tensor]]:
    """Features and classes."""
    generator = torch.Generator().manual_seed(5)
    xs = torch.randn(samples, FEATURES, generator=generator)
    ys = torch.randint(0, CLASSES, (samples,), generator=generator)
    return list(zip(xs, ys, strict=True))


def _fit(
    kind: str, dp: int, arguments: dict[str, Any], training: Training, norm: str
) -> tuple[Outcome, list[float], dict[str, Tensor]]:
    strategy = {
        "single": lambda: SingleDeviceStrategy(torch.device("cpu")),
        "ddp": DDPStrategy,
        "mcore": lambda: MCoreStrategy(**arguments),
    }[kind]()
    torch.manual_seed(11)
    module = Plain(training, norm)
    torch.manual_seed(1)
    outcome = fit(module, make_data(training.samples), dp, dp, strategy, training)
    buffers = {name: value.detach().clone() for name, value in module.named_buffers()}
    return outcome, module.norms, buffers


@functools.cache
def single_device(training: Training) -> Reference:
    """Lightning's own run of the whole global batch."""
    ((outcome, norms, _),) = run_ranks(_fit, 1, "single", 1, {}, training, "layer")
    return Reference(outcome.losses, norms, outcome.state)


NO_SHARDS = {"use_distributed_optimizer": False}
SHARDS = {"use_distributed_optimizer": True}
OVERLAP = {**SHARDS, "overlap_grad_reduce": True, "bucket_size": 200}

CASES = {
    "distopt": (SHARDS, Training()),
    "distopt-overlap-buckets-2mb": ({**OVERLAP, "micro_batch_size": 2}, Training(clip=0.5)),
    "distopt-overlap-accumulate-groups": (OVERLAP, Training(accumulate=2, optimizer="groups")),
    "no-distopt-adam-l2": (NO_SHARDS, Training(optimizer="adam_l2", clip=0.5)),
    "overlap-no-distopt": ({**NO_SHARDS, "overlap_grad_reduce": True}, Training()),
    "sgd-4mb-accumulate": ({"micro_batch_size": 1}, Training(optimizer="sgd", accumulate=2)),
    "rmsprop": ({}, Training(optimizer="rmsprop")),
    "rmsprop-accumulate-clip": ({}, Training(optimizer="rmsprop", accumulate=2, clip=0.5)),
    "adagrad-overlap": ({"overlap_grad_reduce": True}, Training(optimizer="adagrad")),
    "clip-by-value": (SHARDS, Training(clip=1e-2, clip_algorithm="value")),
}

BF16 = {
    "distopt": (SHARDS, Training(precision="bf16-mixed")),
    "no-distopt-2mb-clip": (
        {**NO_SHARDS, "micro_batch_size": 2},
        Training(precision="bf16-mixed", clip=0.5),
    ),
    "rmsprop": ({}, Training(precision="bf16-mixed", optimizer="rmsprop")),
    "true": ({}, Training(precision="bf16-true")),
}


def _compared(arguments: dict[str, Any], training: Training) -> tuple[list[Outcome], Reference]:
    ranks = [
        outcome for outcome, _, _ in run_ranks(_fit, 2, "mcore", 2, arguments, training, "layer")
    ]
    dtype = torch.bfloat16 if training.precision == "bf16-true" else None
    check_batches(ranks, make_data(training.samples), dtype)
    for outcome in ranks:
        for name, value in arguments.items():
            assert outcome.switches.get(name, value) == value
    return ranks, single_device(training)


@pytest.mark.parametrize("case", CASES)
def test_fp32(case):
    arguments, training = CASES[case]
    ranks, reference = _compared(arguments, training)
    check_steps(ranks, reference, norm=1e-4)
    check_parameters(ranks, reference.parameters, 1e-5)


@pytest.mark.parametrize("case", BF16)
def test_bf16(case):
    arguments, training = BF16[case]
    ranks, reference = _compared(arguments, training)
    check_steps(ranks, reference, loss=2e-2, norm=2e-2)
    check_parameters(ranks, reference.parameters, 2e-2)


@pytest.mark.parametrize("arguments", [SHARDS, NO_SHARDS], ids=["distopt", "no-distopt"])
def test_batch_norm_like_ddp(arguments):
    """With statistics of each rank's own samples the counterpart is DDP, not one process."""
    training = Training()
    expected = run_ranks(_fit, 2, "ddp", 2, {}, training, "batch")
    ranks = run_ranks(_fit, 2, "mcore", 2, arguments, training, "batch")
    # DDP's loss is that of each rank.
    losses = torch.tensor([outcome.losses for outcome, _, _ in expected]).mean(0).tolist()
    outcomes = [outcome for outcome, _, _ in ranks]
    reference = Reference(losses, expected[0][1], expected[0][0].state)
    check_steps(outcomes, reference)
    check_parameters(outcomes, reference.parameters, 1e-5)
    # Running statistics are those of a rank's own samples until an evaluation.
    for name, value in ranks[0][2].items():
        assert torch.allclose(value.float(), expected[0][2][name].float(), atol=1e-5), name


def check_parameters(ranks: list[Outcome], expected: dict[str, Tensor], tolerance: float) -> None:
    """Checks every rank's copy of every parameter."""
    for rank, outcome in enumerate(ranks):
        assert set(outcome.state) == set(expected)
        for name, value in outcome.state.items():
            assert value.isfinite().all()
            off = (value.float() - expected[name].float()).abs().max().item()
            assert off <= tolerance, f"rank {rank}: {name} off by {off:.2e}"
