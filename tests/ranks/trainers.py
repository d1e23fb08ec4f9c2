"""How the tests of this folder make Trainers, data and small models."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_mcore import MCoreStrategy
from lightning_mcore.errors import ConfigurationError
from tests.gpt import GPT, call_gpt, token_dataset

SIZES: dict[str, dict[str, int]] = {
    "dp2": {},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "pp2vpp2": {"pp": 2, "vpp": 2},
    "tp2pp2": {"tp": 2, "pp": 2},
    "dp2pp2": {"pp": 2},
}
"""Arguments of the strategy for each layout; ``dp`` is what the number of ranks leaves."""

WIDTH = 6


def dp_of(layout: str) -> int:
    """Data-parallel size of a layout of ``SIZES``."""
    return 2 if layout.startswith("dp2") else 1


def ranks_of(layout: str) -> int:
    """Processes that a layout of ``SIZES`` takes."""
    return SIZES[layout].get("tp", 1) * SIZES[layout].get("pp", 1) * dp_of(layout)


def world_size() -> int:
    """Ranks of this run; a Trainer's teardown forgets the environment variable."""
    if torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return int(os.environ["WORLD_SIZE"])


def make_trainer(strategy: Mapping[str, Any], **options: Any) -> L.Trainer:
    """A quiet Trainer over all ranks with an MCoreStrategy; ``options`` go to the Trainer."""
    defaults = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "max_epochs": 1,
    }
    return L.Trainer(
        devices=world_size(),
        strategy=MCoreStrategy(**strategy),
        **{**defaults, **options},
    )


def numbered_tokens(samples: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """Token sequences whose ``id`` is their place in the data set."""
    return [
        {"id": torch.tensor(index), "tokens": tokens, "labels": labels}
        for index, (tokens, labels) in enumerate(token_dataset(samples, seed))
    ]


def numbered_rows(samples: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """Regression samples ``x`` ``[6]`` -> ``y`` ``[1]`` whose ``id`` is their place."""
    generator = torch.Generator().manual_seed(seed)
    xs = torch.randn(samples, WIDTH, generator=generator)
    ys = xs.sum(1, keepdim=True).sin()
    return [{"id": torch.tensor(i), "x": xs[i], "y": ys[i]} for i in range(samples)]


def loader(data: Any, batch_size: int, **options: Any) -> DataLoader:
    """A DataLoader in this process."""
    return DataLoader(data, batch_size=batch_size, **options)


class NumberedGPT(GPT):
    """The tests' GPT on batches of ``numbered_tokens``."""

    def losses(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Loss of each sample ``[b]``; on the last stage only."""
        return call_gpt(self.model, batch["tokens"], batch["labels"]).mean(1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.losses(batch).mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.losses(batch).mean())

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.losses(batch).mean())

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        return {"id": batch["id"], "loss": self.losses(batch)}


def make_blocks() -> nn.Sequential:
    """Four small blocks with fixed weights: any pipeline up to four stages."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        hidden = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
        return nn.Sequential(*hidden, nn.Linear(WIDTH, 1))


class Blocks(L.LightningModule):
    """An ``nn.Sequential`` that the strategy cuts into stages.

    Args:
        make_optimizer: What ``configure_optimizers`` returns, from this module.
    """

    def __init__(self, make_optimizer: Callable[[L.LightningModule], Any] | None = None) -> None:
        super().__init__()
        self.model: nn.Module | None = None
        self.make_optimizer = make_optimizer

    def configure_model(self) -> None:
        if self.model is None:
            self.model = self.trainer.strategy.build(make_blocks())

    def losses(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Squared error of each sample ``[b]``; on the last stage only."""
        return (self.model(batch["x"]) - batch["y"]).square().mean(1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.losses(batch).mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.losses(batch).mean())

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.losses(batch).mean())

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch["x"])

    def configure_optimizers(self) -> Any:
        if self.make_optimizer is not None:
            return self.make_optimizer(self)
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Recorder(L.Callback):
    """What the Trainer knew after each training batch, and which samples each batch held."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []
        self.losses: list[float] = []
        self.ids: list[list[int]] = []
        self.validation: list[dict[str, float]] = []
        self.grad_norms: list[float | None] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        self.metrics.append(as_floats(trainer.callback_metrics))
        self.losses.append(float(outputs["loss"]))
        if isinstance(batch, Mapping) and "id" in batch:
            self.ids.append(batch["id"].tolist())
        stats = trainer.strategy.step_stats
        self.grad_norms.append(stats.grad_norm if stats is not None else None)

    def on_validation_end(self, trainer, module) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self.validation.append(as_floats(trainer.callback_metrics))


def refused(fit: Callable[[], Any]) -> str:
    """The ``ConfigurationError`` that ``fit`` raises; empty if it raises none."""
    try:
        fit()
    except ConfigurationError as error:
        return str(error)
    return ""


def as_floats(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Values of metrics on the host, sorted by name."""
    return {name: float(metrics[name]) for name in sorted(metrics)}


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Copies of this rank's parameters by name, without the numbering of chunks."""
    return {
        name.split("chunks.")[-1]: param.detach().clone()
        for name, param in module.named_parameters()
    }


def block_weights(module: nn.Module) -> dict[str, Tensor]:
    """Copies of the parameters of ``make_blocks`` on this rank, by their name in the whole."""
    return {
        name.split("blocks.")[-1]: param.detach().clone()
        for name, param in module.named_parameters()
    }


def joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The whole model's weights; those that several ranks hold must be equal."""
    whole: dict[str, Tensor] = {}
    for part in parts:
        for name, value in part.items():
            torch.testing.assert_close(value, whole.setdefault(name, value), rtol=0, atol=0)
    return whole


def train_plainly(
    data: list[dict[str, Tensor]],
    batches: list[list[list[int]]],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    *,
    lrs: list[list[float]] | None = None,
    clip: Callable[[list[Tensor]], Any] | None = None,
    divisor: int = 1,
) -> tuple[dict[str, Tensor], list[float]]:
    """Trains ``make_blocks`` in a loop of torch alone.

    Args:
        data: Samples by number.
        batches: Sample numbers of each batch of each step.
        make_optimizer: As for ``Blocks``.
        lrs: Learning rate of each group at each step, where it changes.
        clip: Called with the parameters before each step.
        divisor: Of each batch's mean loss.

    Returns:
        Weights, and the norm of the gradient of each step before clipping.
    """
    model = make_blocks()
    optimizer = make_optimizer(model)
    norms = []
    for step, of_step in enumerate(batches):
        for group, lr in zip(optimizer.param_groups, lrs[step] if lrs else [], strict=False):
            group["lr"] = lr
        optimizer.zero_grad()
        for ids in of_step:
            x = torch.stack([data[i]["x"] for i in ids])
            y = torch.stack([data[i]["y"] for i in ids])
            ((model(x) - y).square().mean() / divisor).backward()
        params = list(model.parameters())
        norms.append(float(torch.stack([p.grad.norm() for p in params]).norm()))
        if clip is not None:
            clip(params)
        optimizer.step()
    return block_weights(model), norms
