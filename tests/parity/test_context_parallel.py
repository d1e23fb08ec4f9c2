"""Context parallelism against one process: same weights, same batches, also with uneven masks."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor

from lightning_mcore import MCoreStrategy
from lightning_mcore._mcore.cpu import CpuAdapter
from lightning_mcore.testing import run_ranks
from tests.context_gpt import context_chunk, masked_dataset, token_mean, whole_batch
from tests.gpt import token_dataset
from tests.parity.layouts import ContextGPT, Outcome, check_batches, check_steps, fit
from tests.parity.one_process import CPU_FIELDS, Reference, gpt_reference
from tests.parity.recipes import (
    GLOBAL_BATCH,
    OPTIMIZERS,
    STEPS,
    Training,
    global_batch,
    make_schedule,
)
from tests.parity.weights import check_shards, fill, full_tensors


@dataclass(frozen=True)
class Case:
    """One training: in which layout, and whether some tokens do not count."""

    world_size: int
    strategy: Mapping[str, Any] = field(hash=False)
    masked: bool = False
    training: Training = field(default_factory=Training)

    @property
    def dp(self) -> int:
        strategy = self.strategy
        ranks = strategy.get("cp", 1) * strategy.get("tp", 1) * strategy.get("pp", 1)
        return self.world_size // ranks


DISTOPT = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "bucket_size": 4000,
}
PLAIN = {"use_distributed_optimizer": False, "overlap_grad_reduce": False}

CASES = {
    "cp2": Case(2, {"cp": 2}),
    "cp2-no-distopt-2mb-accumulate": Case(
        2, {"cp": 2, **PLAIN, "micro_batch_size": 4}, training=Training(True, accumulate=2)
    ),
    "cp2-masked-distopt-4mb-clip": Case(
        2, {"cp": 2, **DISTOPT, "micro_batch_size": 2}, True, Training(clip=0.5)
    ),
    "cp2-masked-accumulate": Case(
        2, {"cp": 2, "micro_batch_size": 4}, True, Training(True, accumulate=2)
    ),
    "cp2ep2": Case(2, {"cp": 2, "ep": 2, **DISTOPT}, training=Training(experts=4)),
    "cp2ep2-masked-2mb": Case(
        2, {"cp": 2, "ep": 2, "micro_batch_size": 4}, True, Training(experts=4)
    ),
    "dp2-masked-2mb": Case(2, {**DISTOPT, "micro_batch_size": 2}, True),
    "pp2-masked-4mb-accumulate": Case(
        2, {"pp": 2, "micro_batch_size": 2}, True, Training(accumulate=2)
    ),
    "cp2tp2": Case(4, {"cp": 2, "tp": 2, "sequence_parallel": True, "micro_batch_size": 4}),
    "cp2pp2": Case(4, {"cp": 2, "pp": 2, "micro_batch_size": 2}, training=Training(True)),
    "cp2pp2vpp2-masked": Case(
        4, {"cp": 2, "pp": 2, "vpp": 2, "micro_batch_size": 2}, True, Training(True, clip=0.5)
    ),
    "cp2dp2-distopt": Case(4, {"cp": 2, **DISTOPT}),
    "cp2dp2-masked-distopt-2mb": Case(4, {"cp": 2, **DISTOPT, "micro_batch_size": 2}, True),
    "cp2dp2-masked-accumulate": Case(4, {"cp": 2, **PLAIN}, True, Training(accumulate=2)),
    "cp4-masked": Case(4, {"cp": 4}, True),
}


def _train(names: list[str]) -> list[Outcome]:
    outcomes = []
    for case in (CASES[name] for name in names):
        training = case.training
        torch.manual_seed(1)
        module = ContextGPT(training, case.masked)
        data = (masked_dataset if case.masked else token_dataset)(training.samples)
        strategy = MCoreStrategy(**case.strategy, per_token_loss=case.masked)
        outcome = fit(module, data, case.world_size, case.dp, strategy, training)
        outcome.shards = [shard.copied() for shard in module.shards]
        outcome.state = {}
        outcomes.append(outcome)
    return outcomes


@functools.cache
def _outcomes(world_size: int) -> dict[str, list[Outcome]]:
    """What every rank saw, by case; all cases of one size in the same processes."""
    names = [name for name, case in CASES.items() if case.world_size == world_size]
    by_rank = run_ranks(_train, world_size, names, timeout_s=200)
    return dict(zip(names, zip(*by_rank, strict=True), strict=True))  # type: ignore[arg-type]


def _train_masked(trainings: list[Training]) -> list[Reference]:
    dist.init_process_group("gloo")
    with CpuAdapter():
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        return [_masked_loop(training) for training in trainings]


def _masked_loop(training: Training) -> Reference:
    """Plain torch: the mean over all tokens that count in the batches of a step."""
    model = context_chunk(
        tied=training.tied, experts=training.experts, params_dtype=torch.float32, **CPU_FIELDS
    )
    shards = fill(model)
    data = masked_dataset(training.samples)
    optimizer = OPTIMIZERS[training.optimizer](model.named_parameters())
    schedule = make_schedule(optimizer)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        parts: list[tuple[Tensor, Tensor]] = []
        for part in range(training.accumulate):
            tokens, labels, mask = whole_batch(
                global_batch(data, step * training.accumulate + part)
            )
            positions = torch.arange(tokens.shape[1]).expand_as(tokens)
            parts.append(token_mean(model(tokens, positions, None, labels=labels), mask))
            losses.append(parts[-1][0].item())
        total = sum(count for _, count in parts)
        sum(mean * count / total for mean, count in parts).backward()
        params = [param for param in model.parameters() if param.grad is not None]
        limit = training.clip or float("inf")
        norms.append(torch.nn.utils.clip_grad_norm_(params, limit).item())
        optimizer.step()
        schedule.step()
    return Reference(losses, norms, full_tensors(shard.copied() for shard in shards))


@functools.cache
def _masked_references() -> dict[Training, Reference]:
    trainings = list({case.training for case in CASES.values() if case.masked})
    return dict(zip(trainings, run_ranks(_train_masked, 1, trainings)[0], strict=True))


@pytest.mark.parametrize("name", CASES)
def test_one_process(name):
    case = CASES[name]
    reference = _masked_references()[case.training] if case.masked else gpt_reference(case.training)
    ranks = list(_outcomes(case.world_size)[name])
    check_steps(ranks, reference)
    check_shards([outcome.shards for outcome in ranks], reference.parameters, 1e-5)
    data = (masked_dataset if case.masked else token_dataset)(case.training.samples)
    check_batches(ranks, data)
    assert {outcome.dp for outcome in ranks} == {case.dp}


def test_the_mask_matters():
    """Tolerances mean something: a mean of means is far from the mean over tokens."""
    training = CASES["cp2dp2-masked-distopt-2mb"].training
    data = masked_dataset(training.samples)
    for step in range(STEPS):
        masks = whole_batch(global_batch(data, step))[2]
        counts = masks.sum(1)
        assert counts.min() < 0.5 * counts.max()
        halves = masks.view(GLOBAL_BATCH, 4, -1)
        first, second = halves[:, [0, 3]].sum(), halves[:, [1, 2]].sum()
        assert abs(first - second) > 1
