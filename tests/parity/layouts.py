"""Trains the tests' GPT under the strategy in one layout and says what happened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_mcore import MCoreStrategy
from lightning_mcore.testing import run_ranks
from tests.context_gpt import context_chunk, token_mean
from tests.gpt import GPT, token_dataset
from tests.parity.one_process import Reference
from tests.parity.recipes import GLOBAL_BATCH, OPTIMIZERS, STEPS, Training, make_schedule
from tests.parity.weights import Shard, fill


@dataclass
class Outcome:
    """What one rank saw."""

    dp_rank: int
    dp: int
    losses: list[float] = field(default_factory=list)
    logged: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    batches: list[Any] = field(default_factory=list)
    """The first tensor of each batch, as lists."""
    switches: dict[str, Any] = field(default_factory=dict)
    starts_gathers: list[bool] = field(default_factory=list)
    """After each batch, whether the schedule is to start gathers of parameters."""
    shards: list[Shard] = field(default_factory=list)
    """Of the engine's models."""
    state: dict[str, Tensor] = field(default_factory=dict)
    """Parameters by name."""
    biases: dict[int, Tensor] = field(default_factory=dict)
    """Of the routers of this rank's expert layers, by number of the layer from 1."""


class Watch(L.Callback):
    """Fills an ``Outcome``."""

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        kwargs = sampler_arguments(trainer)
        self.outcome = Outcome(kwargs["rank"], kwargs["num_replicas"])
        if isinstance(trainer.strategy, MCoreStrategy):
            for switches in (trainer.strategy.switches, trainer.strategy.expert_switches):
                names = type(switches).__dataclass_fields__
                self.outcome.switches |= {n: getattr(switches, n).effective for n in names}

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        # Lightning divides what the step returned by the batches of an accumulation.
        self.outcome.losses.append(float(outputs["loss"]) * trainer.accumulate_grad_batches)
        self.outcome.logged.append(float(trainer.callback_metrics["train_loss"]))
        self.outcome.batches.append(batch[0].tolist())
        if isinstance(trainer.strategy, MCoreStrategy):
            config = trainer.strategy._model_run.chunks[0].config
            self.outcome.starts_gathers.append(config.param_sync_func is not None)
        stepped = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if stepped and isinstance(trainer.strategy, MCoreStrategy):
            self.outcome.grad_norms.append(trainer.strategy.step_stats.grad_norm)

    def on_train_end(self, trainer, module) -> None:
        if isinstance(trainer.strategy, MCoreStrategy):
            trainer.strategy.sync_parameters()
        self.outcome.state = {n: p.detach().clone() for n, p in module.named_parameters()}


class InOrder(L.LightningDataModule):
    """The samples in their order, where Lightning's own sampler would shuffle them."""

    def __init__(self, data: Any, batch_size: int) -> None:
        super().__init__()
        self.data = data
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader:
        kwargs = sampler_arguments(self.trainer)
        sampler = DistributedSampler(self.data, shuffle=False, **kwargs)
        return DataLoader(self.data, batch_size=self.batch_size, sampler=sampler)


def sampler_arguments(trainer: L.Trainer) -> dict[str, int]:
    """``num_replicas`` and ``rank`` as Lightning gives them to a DistributedSampler."""
    return trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}


class ParityGPT(GPT):
    """The tests' GPT with full weights and an optimizer that do not depend on the layout."""

    def __init__(self, training: Training) -> None:
        super().__init__(tied=training.tied, experts=training.experts, moe=dict(training.moe))
        self.training_plan = training
        self.shards: list[Shard] = []

    def make_chunk(self, stage: Any, **fields: Any) -> nn.Module:
        chunk = super().make_chunk(stage, **fields)
        self.shards += fill(chunk)
        return chunk

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS[self.training_plan.optimizer](self.named_parameters())
        schedule = {"scheduler": make_schedule(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class ContextGPT(ParityGPT):
    """Its step is written once, for any ``cp``.

    Args:
        training: What is trained.
        masked: Whether steps give the mean over the tokens that count, and their number; all count
            if the data has no mask.
    """

    def __init__(self, training: Training, masked: bool) -> None:
        super().__init__(training)
        self.masked = masked

    def make_chunk(self, stage: Any, **fields: Any) -> nn.Module:
        chunk = context_chunk(
            is_first=stage.is_first,
            is_last=stage.is_last,
            vp_stage=stage.vp_stage,
            tied=self.hparams.tied,
            experts=self.hparams.experts,
            moe=self.hparams.moe,
            **fields,
        )
        self.shards += fill(chunk)
        return chunk

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, labels, *mask = batch
        positions = self.trainer.strategy.position_ids(tokens)
        losses = self.model(tokens, positions, None, labels=labels)
        if not self.masked:
            loss = losses.mean()
            self.log("train_loss", loss)
            return loss
        loss, count = token_mean(losses, mask[0] if mask else torch.ones_like(losses))
        self.log("train_loss", loss)
        return {"loss": loss, "num_tokens": count}


def biased_routers(module: nn.Module) -> list[Any]:
    """Routers with a bias for each expert, which the engine updates beside the optimizer."""
    return [m for m in module.modules() if getattr(m, "expert_bias", None) is not None]


def fit(
    module: L.LightningModule,
    data: Any,
    world_size: int,
    dp: int,
    strategy: Any,
    training: Training,
) -> Outcome:
    """Trains ``module`` on this rank, on its part of each global batch."""
    watch = Watch()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=strategy,
        callbacks=[watch],
        precision=training.precision,
        max_epochs=1,
        accumulate_grad_batches=training.accumulate,
        gradient_clip_val=training.clip,
        gradient_clip_algorithm=training.clip_algorithm,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=InOrder(data, GLOBAL_BATCH // dp))
    assert trainer.global_step == STEPS
    return watch.outcome


def fit_on_rank(world_size: int, strategy: Mapping[str, Any], training: Training) -> Outcome:
    """Trains the GPT on this rank, together with the others."""
    torch.manual_seed(1)
    per_token = strategy.get("per_token_loss", False)
    if per_token or strategy.get("cp", 1) > 1:
        module: ParityGPT = ContextGPT(training, per_token)
    else:
        module = ParityGPT(training)
    dp = world_size // (strategy.get("tp", 1) * strategy.get("cp", 1) * strategy.get("pp", 1))
    data = token_dataset(training.samples)
    outcome = fit(module, data, world_size, dp, MCoreStrategy(**strategy), training)
    outcome.shards = [shard.copied() for shard in module.shards]
    outcome.biases = {
        router.layer_number: router.expert_bias.clone() for router in biased_routers(module)
    }
    outcome.state = {}
    return outcome


def fit_gpt(world_size: int, strategy: Mapping[str, Any], training: Training) -> list[Outcome]:
    """Trains the GPT on ``world_size`` ranks."""
    return run_ranks(fit_on_rank, world_size, world_size, strategy, training)


def check_steps(
    ranks: list[Outcome], reference: Reference, *, loss: float = 1e-5, norm: float = 1e-4
) -> None:
    """Checks losses (absolute) and gradient norms (relative) of every rank in every step."""
    expected_losses = torch.tensor(reference.losses)
    expected_norms = torch.tensor(reference.grad_norms)
    # A comparison of two constants, or of NaN with NaN, would prove nothing.
    assert expected_losses.isfinite().all()
    assert expected_norms.isfinite().all()
    assert len(set(reference.losses)) == len(reference.losses)
    for rank, outcome in enumerate(ranks):
        losses, norms = torch.tensor(outcome.losses), torch.tensor(outcome.grad_norms)
        assert losses.shape == expected_losses.shape
        assert norms.shape == expected_norms.shape
        assert losses.isfinite().all()
        assert norms.isfinite().all()
        off = (losses - expected_losses).abs().max().item()
        assert off <= loss, f"rank {rank}: loss off by {off:.2e}: {losses} != {expected_losses}"
        off = ((norms - expected_norms).abs() / expected_norms).max().item()
        assert off <= norm, f"rank {rank}: norm off by {off:.2e}: {norms} != {expected_norms}"
        assert outcome.losses == ranks[0].losses, rank
        assert outcome.logged == ranks[0].logged, rank
        assert outcome.logged == outcome.losses, rank


def check_batches(ranks: list[Outcome], data: Any, dtype: torch.dtype | None = None) -> None:
    """Checks that rank ``r`` of ``dp`` drew samples ``r, r + dp, ...`` of each global batch."""
    for outcome in ranks:
        for index, rows in enumerate(outcome.batches):
            start = index * GLOBAL_BATCH
            mine = range(start + outcome.dp_rank, start + GLOBAL_BATCH, outcome.dp)
            assert rows == [data[i][0].to(dtype).tolist() for i in mine]
    assert {outcome.dp_rank for outcome in ranks} == set(range(ranks[0].dp))
