"""Optimizers that the engine has on GPUs, loss scales, and optimizers of users' own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_mcore._mcore.chained import loss_scalers
from lightning_mcore.precision import MCorePrecision
from lightning_mcore.testing import run_ranks
from tests.gpt import GPT, token_dataset
from tests.ranks.halves_adam import use_in_engine
from tests.ranks.trainers import Blocks, block_weights, loader, make_trainer, numbered_rows

STEPS, SAVED, BATCH = 6, 3, 2
BAD_STEP = 1


class Subclassed(torch.optim.AdamW):
    """One that the engine does not know, which counts its steps as torch's does."""


class Momentum(torch.optim.Optimizer):
    """Its state is its own: a tensor that counts, and one of another shape."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["sum"] = torch.zeros(3)
                state["step"] += 1
                state["sum"] += param.grad.norm()
                param -= group["lr"] / state["step"] / (1 + state["sum"][0]) * param.grad


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda module: torch.optim.AdamW(module.parameters(), lr=0.02),
    "sgd": lambda module: torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9),
    "subclassed": lambda module: Subclassed(module.parameters(), lr=0.02),
    "momentum": lambda module: Momentum(module.parameters(), lr=0.1),
}


class Save(L.Callback):
    """Saves at some numbers of steps."""

    def __init__(self, folder: Path, *when: int) -> None:
        self._folder, self._when = folder, when

    def on_train_start(self, trainer, module) -> None:
        if 0 in self._when:
            trainer.save_checkpoint(self._folder / "0.ckpt")

    def on_train_batch_end(self, trainer, *_) -> None:
        if trainer.global_step in self._when:
            trainer.save_checkpoint(self._folder / f"{trainer.global_step}.ckpt")


def train(
    optimizer: str, *callbacks: L.Callback, resume: Path | None = None, **options: Any
) -> dict[str, Tensor]:
    """The weights after a run, whole or resumed."""
    module = Blocks(OPTIMIZERS[optimizer])
    trainer = make_trainer({}, callbacks=list(callbacks), max_steps=STEPS, **options)
    trainer.fit(module, loader(numbered_rows(STEPS * BATCH * 2), BATCH), ckpt_path=resume)
    return {name: value.float() for name, value in block_weights(module).items()}


# ------------------------------------------------------------------------------ loss scale


class Overflowing(GPT):
    """In one step, gradients of dense parameters overflow, or all do."""

    def __init__(self, everywhere: bool) -> None:
        super().__init__(experts=4)
        self.everywhere, self.factor = everywhere, 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.factor = float("inf") if batch_idx == BAD_STEP else 1.0
        if batch_idx == 0:
            for param in self.parameters():
                if self.everywhere or getattr(param, "allreduce", True):
                    param.register_hook(lambda grad: grad + (self.factor - 1.0))
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def with_overflow(everywhere: bool) -> tuple[dict[str, Tensor], int, list[float]]:
    """Weights in fp16, steps that were skipped, and the loss scale of each part at the end."""
    torch.manual_seed(0)
    scales: list[float] = []

    class Scales(L.Callback):
        def on_train_batch_end(self, trainer, *_) -> None:
            engine = trainer.strategy._model_run.optimizer.engine
            scales[:] = [float(scaler.scale) for scaler in loss_scalers(engine)]

    module = Overflowing(everywhere)
    trainer = make_trainer(
        {"ep": 2, "optimizer": {"initial_loss_scale": 256.0, "hysteresis": 1}},
        plugins=[MCorePrecision("16-mixed")],
        callbacks=[Scales()],
        max_steps=3,
    )
    trainer.fit(module, loader(token_dataset(24), 4))
    weights = {name: param.detach().clone() for name, param in module.named_parameters()}
    return weights, trainer.strategy.skipped_steps, scales


# ------------------------------------------------------------------------------ all in one


def all_runs(folder: str) -> dict[str, Any]:
    """Weights by case; torch's optimizers first, as there is no way back from the fused ones."""
    true = {"precision": "bf16-true"}
    root = Path(folder)
    found: dict[str, Any] = {}
    for name in ("subclassed", "momentum"):
        found[name] = train(name, Save(root / name, SAVED))
        found[name, "resumed"] = train(name, resume=root / name / f"{SAVED}.ckpt")
    found["dense overflow"], found["overflow"] = with_overflow(False), with_overflow(True)
    found["sgd"] = train("sgd", **true)
    found["adamw"] = train("adamw", Save(root / "torch", SAVED), **true)
    use_in_engine()
    found["sgd", "fused"] = train("sgd", **true)
    found["adamw", "fused"] = train("adamw", Save(root / "fused", 0, SAVED), **true)
    for saved in ("fused/0", f"fused/{SAVED}", f"torch/{SAVED}"):
        found["adamw", saved] = train("adamw", resume=root / f"{saved}.ckpt", **true)
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[dict[Any, Any]]:
    return run_ranks(all_runs, 2, str(tmp_path_factory.mktemp("fused")), timeout_s=200)


def check_equal(mine: dict[str, Tensor], theirs: dict[str, Tensor], apart: float = 0.0) -> None:
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, rtol=apart, atol=apart, msg=name)


@pytest.mark.parametrize("optimizer", ["subclassed", "momentum"])
def test_state_of_users_own_optimizers_is_restored(runs, optimizer):
    check_equal(runs[0][optimizer, "resumed"], runs[0][optimizer])


def test_sgd_trains_bf16_parameters(runs):
    check_equal(runs[0]["sgd", "fused"], runs[0]["sgd"])


def test_moments_of_bf16_parameters(runs):
    """In fp32 where the optimizer keeps them so, saved at any time and by any optimizer."""
    found = runs[0]
    for saved in ("fused/0", f"fused/{SAVED}"):
        check_equal(found["adamw", saved], found["adamw", "fused"])
    # Three steps of other moments, in weights of 8 bits.
    check_equal(found["adamw", f"torch/{SAVED}"], found["adamw"], apart=2**-5)


def test_one_loss_scale(runs):
    """An overflow among dense parameters alone is one for the experts too."""
    for found in runs:
        (mine, skipped, scales), (theirs, _, _) = found["dense overflow"], found["overflow"]
        assert skipped == 1
        assert scales == [128.0, 128.0]
        assert any("experts" in name for name in mine)
        check_equal(mine, theirs)
