"""An ``nn.Sequential`` cut into pipeline stages against the same one in one process."""

from __future__ import annotations

import functools
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_mcore import MCoreStrategy
from lightning_mcore.testing import run_ranks
from tests.parity.layouts import Outcome, check_batches, check_steps, fit
from tests.parity.one_process import Reference, train_plainly
from tests.parity.recipes import OPTIMIZERS, Training, make_schedule

CLASSES = 5
TOKENS, WIDTH = 6, 12


class FirstToken(nn.Module):
    """``[b, s, h]`` to ``[b, h]``."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden[:, 0]


def _mlp() -> nn.Sequential:
    """Boundaries of other sizes than input and output, growing and shrinking."""
    return nn.Sequential(
        nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 7), nn.GELU(), nn.Linear(7, 33), nn.Tanh(),
        nn.LayerNorm(33), nn.Linear(33, CLASSES),
    )  # fmt: skip


def _conv() -> nn.Sequential:
    """Boundaries of four, then of two dims."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 3, 4)), nn.Conv2d(1, 6, 3, padding=1), nn.GELU(),
        nn.Conv2d(6, 3, 2), nn.Flatten(), nn.Linear(18, 16), nn.Tanh(), nn.Linear(16, CLASSES),
    )  # fmt: skip


def _transformer() -> nn.Sequential:
    """Integer input, boundaries of three dims."""
    layers = [
        nn.TransformerEncoderLayer(WIDTH, 2, 24, dropout=0.0, batch_first=True) for _ in range(3)
    ]
    return nn.Sequential(
        nn.Embedding(16, WIDTH), *layers, FirstToken(), nn.Linear(WIDTH, CLASSES)
    )  # fmt: skip


MODELS = {"mlp": _mlp, "conv": _conv, "transformer": _transformer}


def make_model(name: str) -> nn.Sequential:
    """The same weights on every call."""
    with torch.random.fork_rng():
        torch.manual_seed(11)
        return MODELS[name]()


def make_data(name: str, samples: int) -> list[tuple[Tensor, Tensor]]:
    """Inputs and classes."""
    generator = torch.Generator().manual_seed(5)
    if name == "transformer":
        xs = torch.randint(0, 16, (samples, TOKENS), generator=generator)
    else:
        xs = torch.randn(samples, 12, generator=generator)
    ys = torch.randint(0, CLASSES, (samples,), generator=generator)
    return list(zip(xs, ys, strict=True))


class Classifier(L.LightningModule):
    """Its model is a plain ``nn.Sequential``."""

    def __init__(self, name: str, training: Training) -> None:
        super().__init__()
        self.name = name
        self.training_plan = training
        self.model: nn.Module | None = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = self.trainer.strategy.build(make_model(self.name))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, classes = batch
        loss = functional.cross_entropy(self.model(inputs), classes)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS[self.training_plan.optimizer](self.named_parameters())
        schedule = {"scheduler": make_schedule(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def _loss(model: nn.Module, samples: Any) -> Tensor:
    inputs, classes = (torch.stack(column) for column in zip(*samples, strict=True))
    return functional.cross_entropy(model(inputs), classes)


@functools.cache
def reference_of(name: str, training: Training) -> Reference:
    """One process, torch alone: neither Lightning nor the engine."""
    model = make_model(name)
    losses, norms = train_plainly(model, _loss, make_data(name, training.samples), training)
    return Reference(losses, norms, {n: p.detach() for n, p in model.named_parameters()})


def _fit(name: str, world_size: int, strategy: dict[str, Any], training: Training) -> Outcome:
    torch.manual_seed(1)
    dp = world_size // strategy.get("pp", 1)
    data = make_data(name, training.samples)
    return fit(
        Classifier(name, training), data, world_size, dp, MCoreStrategy(**strategy), training
    )


PP2VPP2 = {"pp": 2, "vpp": 2}

CASES = {
    "mlp-pp2-2mb": ("mlp", 2, {"pp": 2, "micro_batch_size": 4}, Training(clip=0.5)),
    "mlp-pp2vpp2-4mb": ("mlp", 2, {**PP2VPP2, "micro_batch_size": 2}, Training()),
    "mlp-pp2dp2": ("mlp", 4, {"pp": 2, "micro_batch_size": 2}, Training(optimizer="groups")),
    "mlp-pp2vpp2dp2-overlap-accumulate": (
        "mlp",
        4,
        {
            **PP2VPP2,
            "micro_batch_size": 2,
            "overlap_grad_reduce": True,
            "use_distributed_optimizer": True,
            "bucket_size": 300,
        },
        Training(accumulate=2),
    ),
    "mlp-pp4-8mb-rmsprop": ("mlp", 4, {"pp": 4}, Training(optimizer="rmsprop")),
    "conv-pp2-8mb-accumulate": ("conv", 2, {"pp": 2}, Training(accumulate=2)),
    "conv-pp2vpp2-2mb-sgd": (
        "conv", 2, {**PP2VPP2, "micro_batch_size": 4}, Training(optimizer="sgd", clip=0.5)
    ),
    "conv-pp2dp2-no-distopt": (
        "conv", 4, {"pp": 2, "use_distributed_optimizer": False}, Training(clip=0.5)
    ),
    "transformer-dp2-4mb": ("transformer", 2, {"micro_batch_size": 1}, Training()),
    "transformer-pp2-4mb": ("transformer", 2, {"pp": 2, "micro_batch_size": 2}, Training()),
    "transformer-pp2vpp2-2mb": ("transformer", 2, {**PP2VPP2, "micro_batch_size": 4}, Training()),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_fp32(case):
    name, world_size, strategy, training = CASES[case]
    reference = reference_of(name, training)
    ranks = run_ranks(_fit, world_size, name, world_size, strategy, training)
    check_batches(ranks, make_data(name, training.samples))
    check_steps(ranks, reference)
    check_parameters(ranks, reference, 1e-5)


@pytest.mark.parametrize("strategy", [{"pp": 2, "micro_batch_size": 2}, PP2VPP2], ids=str)
def test_bf16_mixed(strategy):
    training = Training()
    halves = Training(precision="bf16-mixed")
    reference = reference_of("mlp", training)
    ranks = run_ranks(_fit, 2, "mlp", 2, strategy, halves)
    check_steps(ranks, reference, loss=2e-2, norm=2e-2)
    check_parameters(ranks, reference, 2e-2)


def check_parameters(ranks: list[Outcome], reference: Reference, tolerance: float) -> None:
    """Checks every copy of every parameter by its place in the whole model."""
    seen = set()
    for rank, outcome in enumerate(ranks):
        for name, value in outcome.state.items():
            key = name.split("blocks.")[-1]
            expected = reference.parameters[key]
            assert value.isfinite().all()
            off = (value.float() - expected).abs().max().item()
            assert off <= tolerance, f"rank {rank}: {key} off by {off:.2e}"
            seen.add(key)
    assert seen == set(reference.parameters)
