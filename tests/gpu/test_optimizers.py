"""Optimizers and loss scales on GPUs that are other code there than on CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor, nn

from lightning_mcore._mcore.chained import loss_scalers
from lightning_mcore.testing import run_ranks
from tests.gpu.gpus import needs_gpus
from tests.ranks.test_fused_optimizers import check_equal
from tests.ranks.test_late_norm import reading
from tests.ranks.test_nonfinite import BAD_STEP, outcome
from tests.ranks.trainers import (
    Blocks,
    block_weights,
    loader,
    make_blocks,
    make_trainer,
    numbered_rows,
)

pytestmark = needs_gpus(1)

STEPS, SAVED, BATCH = 6, 3, 4
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda module: torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9),
    "adamw": lambda module: torch.optim.AdamW(module.parameters(), lr=0.02),
    "asgd": lambda module: torch.optim.ASGD(module.parameters(), lr=0.05),
    "adafactor": lambda module: torch.optim.Adafactor(module.parameters(), lr=0.1),
}
CASES = [
    ("sgd", "bf16-true"),
    ("sgd", "32-true"),
    ("sgd", "16-mixed"),
    ("adamw", "bf16-true"),
    ("adamw", "16-mixed"),
    ("asgd", "32-true"),
    ("adafactor", "32-true"),
]


class Save(L.Callback):
    """Saves before the first step and in the middle, and notes the loss scale."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self.scales: list[float] = []

    def on_train_start(self, trainer, module) -> None:
        if self._folder is not None:
            trainer.save_checkpoint(self._folder / "0.ckpt")

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        scalers = loss_scalers(trainer.strategy._model_run.optimizer.engine)
        self.scales += [float(scaler.scale) for scaler in scalers]
        if self._folder is not None and trainer.global_step == SAVED:
            trainer.save_checkpoint(self._folder / f"{SAVED}.ckpt")


def train(
    world: int, optimizer: str, precision: Any, folder: Path | None, resume: Path | None = None
) -> tuple[dict[str, Tensor], list[float]]:
    save, module = Save(folder), Blocks(OPTIMIZERS[optimizer])
    # Large enough to overflow in the first steps.
    scale = {"initial_loss_scale": 2.0**18, "hysteresis": 1} if precision == "16-mixed" else {}
    trainer = make_trainer(
        {"optimizer": scale},
        accelerator="gpu",
        precision=precision,
        max_steps=STEPS,
        callbacks=[save],
        plugins=[LightningEnvironment()],
    )
    data = numbered_rows(3 * STEPS * BATCH * world)
    trainer.fit(module, loader(data, BATCH), ckpt_path=resume)
    weights = {name: value.float().cpu() for name, value in block_weights(module).items()}
    return weights, save.scales


def all_runs(world: int, folder: str) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for case in CASES:
        place = Path(folder) / "-".join(case)
        found[case] = train(world, *case, place)
        for saved in (0, SAVED):
            found[case, saved] = train(world, *case, None, place / f"{saved}.ckpt")
    return found


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=needs_gpus(2))])
def runs(request, tmp_path_factory) -> list[dict[Any, Any]]:
    folder = str(tmp_path_factory.mktemp("optimizers"))
    return run_ranks(all_runs, request.param, request.param, folder, timeout_s=280)


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_every_parameter_moves(runs, case):
    start = block_weights(make_blocks())
    for found in runs:
        weights, _ = found[case]
        for name, value in weights.items():
            assert value.isfinite().all()
            assert not torch.equal(value, start[name].to(torch.bfloat16).float()), name
            assert not torch.equal(value, start[name]), name


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_resumed(runs, case):
    """To the bit, on every rank, with the loss scale."""
    for found in runs:
        weights, scales = found[case]
        for saved in (0, SAVED):
            again, later = found[case, saved]
            assert later == scales[len(scales) - len(later) :]
            for name, value in weights.items():
                torch.testing.assert_close(again[name], value, rtol=0, atol=0, msg=name)


def poisoned(layout: str, policy: str, *, late: bool) -> Any:
    """What came of a gradient that is not finite, and how often its norm was read late."""
    with reading(late=late) as calls:
        seen = outcome(
            layout,
            "gradient",
            policy,
            accelerator="gpu",
            precision="bf16-mixed",
            gradient_clip_val=0.5,
            plugins=[LightningEnvironment()],
        )
    seen["weights"] = [{k: v.cpu() for k, v in at.items()} for at in seen["weights"]]
    return seen, len(calls)


@needs_gpus(2)
@pytest.mark.parametrize("layout", ["dp2", "pp2"])
@pytest.mark.parametrize(("policy", "steps"), [("skip", 6), ("error", 4)])
def test_a_norm_read_late(layout, policy, steps):
    """As one read at once: nothing changes in the bad step, and training is the same to the bit."""
    late = run_ranks(poisoned, 2, layout, policy, late=True, timeout_s=240)
    at_once = run_ranks(poisoned, 2, layout, policy, late=False, timeout_s=240)
    for (seen, calls), (expected, none) in zip(late, at_once, strict=True):
        assert (calls, none) == (steps, 0)
        assert seen["error"] == expected["error"]
        assert seen["skipped"] == expected["skipped"] == (policy == "skip")
        check_equal(seen["weights"][BAD_STEP], seen["weights"][BAD_STEP - 1])
        for mine, theirs in zip(seen["weights"], expected["weights"], strict=True):
            check_equal(mine, theirs)
