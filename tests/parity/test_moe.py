"""Mixture of experts in every layout against one process that holds all experts.

Losses that balance experts are not linear in the batch: they are computed for each microbatch on
each data-parallel rank, and averaged. With one sample in a microbatch these parts are the same in
every layout, so the one process goes through the samples one by one.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from lightning_mcore import MCoreStrategy
from lightning_mcore._mcore.cpu import CpuAdapter
from lightning_mcore._mcore.engine import engine_version
from lightning_mcore.testing import run_ranks
from tests.gpt import gpt_chunk, token_dataset
from tests.parity.layouts import (
    Outcome,
    ParityGPT,
    biased_routers,
    check_batches,
    check_steps,
    fit,
    fit_on_rank,
)
from tests.parity.one_process import CPU_FIELDS, Reference, gpt_loss
from tests.parity.recipes import (
    GLOBAL_BATCH,
    OPTIMIZERS,
    STEPS,
    Training,
    global_batch,
    make_schedule,
)
from tests.parity.weights import check_shards, fill, full_tensors

EXPERTS = 4
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "ep2": (2, {"ep": 2}),
    "ep2dp4": (4, {"ep": 2}),
    "ep4": (4, {"ep": 4}),
    "tp2ep2": (2, {"tp": 2, "ep": 2, "etp": 1}),
    "tp2ep2dp2": (4, {"tp": 2, "ep": 2, "etp": 1}),
    "pp2ep2": (4, {"pp": 2, "ep": 2}),
    "pp2vpp2ep2": (4, {"pp": 2, "vpp": 2, "ep": 2, "overlap_p2p": True}),
    "tp2etp2": (2, {"tp": 2, "etp": 2}),
    "cp2ep2": (2, {"cp": 2, "ep": 2}),
    "tp2cp2ep2": (4, {"tp": 2, "cp": 2, "ep": 2, "etp": 1}),
}

BALANCED = (
    ("moe_router_load_balancing_type", "aux_loss"),
    ("moe_aux_loss_coeff", 0.5),
    ("moe_z_loss_coeff", 0.1),
    ("moe_router_dtype", "fp32"),
)
"""Far larger than usual, so that a wrong factor shows."""
PER_SEQUENCE = (
    ("moe_router_load_balancing_type", "seq_aux_loss"),
    ("moe_aux_loss_coeff", 0.5),
    ("moe_router_score_function", "sigmoid"),
)
BIASED = (
    ("moe_router_enable_expert_bias", True),
    ("moe_router_bias_update_rate", 0.05),
    ("moe_router_score_function", "sigmoid"),
    ("moe_shared_expert_intermediate_size", 48),
)
QWEN = (
    *BALANCED,
    ("num_query_groups", 2),
    ("normalization", "RMSNorm"),
    ("gated_linear_unit", True),
    ("activation_func", torch.nn.functional.silu),
)
CAPPED = (*BALANCED, ("moe_expert_capacity_factor", 0.75))
PADDED = (*CAPPED, ("moe_pad_expert_input_to_capacity", True))


@dataclass(frozen=True)
class Biases:
    """What one process did."""

    reference: Reference
    biases: dict[int, torch.Tensor]
    """Of the routers after training, by number of the layer."""


def _train(training: Training) -> Biases:
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    moe = dict(training.moe)
    with CpuAdapter():
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        fields = {**CPU_FIELDS, "params_dtype": torch.float32}
        model = gpt_chunk(experts=training.experts, moe=moe, **fields)
        shards = fill(model)
        optimizer = OPTIMIZERS[training.optimizer](model.named_parameters())
        schedule = make_schedule(optimizer)
        data = token_dataset(training.samples)
        losses, norms = [], []
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=False)
            for part in range(training.accumulate):
                batch = global_batch(data, step * training.accumulate + part)
                share = 1.0 / (len(batch) * training.accumulate)
                MoEAuxLossAutoScaler.set_loss_scale(torch.tensor([share]))
                total = 0.0
                for sample in batch:
                    loss = gpt_loss(model, [sample])
                    total += loss.item() / len(batch)
                    (loss * share).backward()
                losses.append(total)
            for router in biased_routers(model):
                counts = router.local_tokens_per_expert
                rate = moe["moe_router_bias_update_rate"]
                router.expert_bias += rate * torch.sign(counts.mean() - counts)
                counts.zero_()
            limit = training.clip or float("inf")
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), limit).item())
            optimizer.step()
            schedule.step()
        biases = {r.layer_number: r.expert_bias.clone() for r in biased_routers(model)}
        full = full_tensors(shard.copied() for shard in shards)
        parallel_state.destroy_model_parallel()
        return Biases(Reference(losses, norms, full), biases)


def _train_all(trainings: list[Training]) -> list[Biases]:
    dist.init_process_group("gloo")
    return [_train(training) for training in trainings]


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    layout: str
    about: str
    moe: tuple[tuple[str, Any], ...]
    switches: dict[str, Any] = field(default_factory=dict, hash=False)
    accumulate: int = 1
    clip: float | None = None

    def __str__(self) -> str:
        return f"{self.layout}-{self.about}"

    @property
    def training(self) -> Training:
        return Training(experts=EXPERTS, moe=self.moe, accumulate=self.accumulate, clip=self.clip)


PER_TOKEN = {"per_token_loss": True}
ALLGATHER = {"moe_dispatcher": "allgather"}
ALLTOALL = {"moe_dispatcher": "alltoall"}

CASES = [
    Case("one", "balanced", BALANCED),
    Case("ep2", "balanced", BALANCED, ALLTOALL, clip=0.5),
    Case("ep2", "balanced-allgather", BALANCED, ALLGATHER),
    Case("tp2ep2", "balanced", BALANCED),
    Case("tp2ep2", "balanced-allgather", BALANCED, ALLGATHER, clip=0.5),
    Case("tp2etp2", "balanced", BALANCED),
    Case("ep2", "per-sequence", PER_SEQUENCE),
    Case("tp2ep2", "per-sequence", PER_SEQUENCE),
    Case("ep2", "biased", BIASED),
    Case("ep2", "like-qwen3", QWEN),
    Case("pp2ep2", "like-qwen3", QWEN),
    Case("ep2", "shared-experts-overlapped", BIASED, {"overlap_moe": "shared_experts"}),
    Case("ep2dp4", "balanced-accumulate", BALANCED, accumulate=2),
    Case("ep2dp4", "capped", CAPPED),
    Case("ep4", "padded", PADDED),
    Case("tp2ep2dp2", "balanced-clip", BALANCED, clip=0.5),
    Case("tp2ep2dp2", "biased-accumulate", BIASED, accumulate=2),
    Case("pp2ep2", "balanced-accumulate", BALANCED, accumulate=2),
    Case("pp2ep2", "balanced-allgather", BALANCED, ALLGATHER),
    Case("pp2vpp2ep2", "balanced", BALANCED),
    Case("pp2vpp2ep2", "biased", BIASED),
    Case("cp2ep2", "balanced", BALANCED),
    Case("tp2cp2ep2", "balanced-clip", BALANCED, clip=0.5),
    Case("ep2", "balanced-per-token", BALANCED, PER_TOKEN),
    Case("pp2ep2", "balanced-per-token-accumulate", BALANCED, PER_TOKEN, accumulate=2),
]  # fmt: skip
if engine_version() >= (0, 19):  # before, the engine is wrong here and refused
    CASES += [
        Case("tp2ep2", "balanced-per-token", BALANCED, PER_TOKEN),
        Case("cp2ep2", "balanced-per-token", BALANCED, PER_TOKEN),
        Case("tp2cp2ep2", "balanced-per-token-clip", BALANCED, PER_TOKEN, clip=0.5),
    ]


@functools.cache
def one_process() -> dict[Training, Biases]:
    """The GPT with all experts in one process, in a loop of torch, for every row."""
    trainings = list(dict.fromkeys(case.training for case in CASES))
    return dict(zip(trainings, run_ranks(_train_all, 1, trainings)[0], strict=True))


def _fit_all(world_size: int, runs: list[tuple[dict[str, Any], Training]]) -> list[Outcome]:
    return [fit_on_rank(world_size, strategy, training) for strategy, training in runs]


@functools.cache
def trained(world_size: int) -> dict[str, list[Outcome]]:
    """What happened on each rank, for all rows with so many ranks: they are started once."""
    cases = [case for case in CASES if LAYOUTS[case.layout][0] == world_size]
    runs = [
        ({**LAYOUTS[case.layout][1], **case.switches, "micro_batch_size": 1}, case.training)
        for case in cases
    ]
    by_rank = run_ranks(_fit_all, world_size, world_size, runs, timeout_s=240)
    return {
        str(case): list(ranks)
        for case, ranks in zip(cases, zip(*by_rank, strict=True), strict=True)
    }


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_one_process(case):
    expected = one_process()[case.training]
    ranks = trained(LAYOUTS[case.layout][0])[str(case)]
    for rank in ranks:
        for name, value in case.switches.items():
            assert rank.switches.get(name, value) == value
    check_batches(ranks, token_dataset(case.training.samples))
    check_steps(ranks, expected.reference)
    check_shards([rank.shards for rank in ranks], expected.reference.parameters, 1e-5)
    found = {layer for rank in ranks for layer in rank.biases}
    assert found == set(expected.biases)
    for rank in ranks:
        for layer, bias in rank.biases.items():
            assert bias.abs().max() > 0.04
            torch.testing.assert_close(bias, expected.biases[layer], rtol=0, atol=1e-6)


def test_what_is_compared_matters():
    """Each ingredient moves the first gradient norm by far more than the tolerance of 2e-4."""
    plain = Training(experts=EXPERTS)
    others = run_ranks(_train_all, 1, [plain])[0][0].reference
    for training, other in one_process().items():
        assert abs(other.reference.grad_norms[0] - others.grad_norms[0]) > 5e-3, training


# ------------------------------------------------------------------------- combined 1F1B

HALF = tuple({**dict(BALANCED), "moe_z_loss_coeff": None}.items())


@pytest.mark.parametrize("layout", ["ep2", "pp2vpp2ep2"])
def test_combined_1f1b_equals_the_plain_schedule(layout):
    """The engine runs it in bf16 only, so it is compared with itself switched off."""
    world_size, sizes = LAYOUTS[layout]
    training = Training(experts=EXPERTS, moe=HALF, precision="bf16-mixed", accumulate=2)
    plain = {**sizes, "micro_batch_size": 1}
    runs = [(plain, training), ({**plain, "overlap_moe": "1f1b"}, training)]
    for off, on in run_ranks(_fit_all, world_size, world_size, runs):
        assert len(set(off.losses)) == len(off.losses)
        assert on.losses == pytest.approx(off.losses, abs=1e-6)
        assert on.logged == on.losses
        assert on.grad_norms == pytest.approx(off.grad_norms, rel=1e-6)
        for mine, other in zip(on.shards, off.shards, strict=True):
            torch.testing.assert_close(mine.value, other.value, rtol=0, atol=1e-6)


DROPPING = (*HALF, ("hidden_dropout", 0.25), ("attention_dropout", 0.5))


def _fit_dropping(
    world_size: int, runs: list[tuple[dict[str, Any], Training]]
) -> list[tuple[Outcome, list[torch.Tensor]]]:
    """What happened, and every dropout mask in the order of drawing."""
    real, found = functional.dropout, []
    for strategy, training in runs:
        masks: list[torch.Tensor] = []

        def noting(x: torch.Tensor, *args: Any, kept: Any = masks, **options: Any) -> torch.Tensor:
            kept.append(real(torch.ones_like(x), *args, **options) != 0)
            return x * kept[-1]

        functional.dropout = noting
        try:
            found.append((fit_on_rank(world_size, strategy, training), masks))
        finally:
            functional.dropout = real
    return found


def _all_differ(masks: list[torch.Tensor]) -> bool:
    return len({mask.numpy().tobytes() for mask in masks}) == len(masks)


def test_combined_1f1b_draws_the_dropout_of_the_plain_schedule():
    """With a pipeline both schedules run forward passes in one order, from one stream."""
    world_size, sizes = LAYOUTS["pp2vpp2ep2"]
    training = Training(experts=EXPERTS, moe=DROPPING, precision="bf16-mixed")
    plain = {**sizes, "micro_batch_size": 1}
    combined = {**plain, "overlap_moe": "1f1b"}
    runs = [(plain, training), (combined, training)]
    for off, on in run_ranks(_fit_dropping, world_size, world_size, runs):
        assert on[0].losses == pytest.approx(off[0].losses, abs=1e-6)
        assert on[0].grad_norms == pytest.approx(off[0].grad_norms, rel=1e-6)
        # 4 microbatches, 2 layers with 3 masks each, and the embedding's on the first stage.
        assert len(on[1]) == len(off[1]) in (STEPS * 4 * 6, STEPS * 4 * 7)
        assert all(torch.equal(a, b) for a, b in zip(on[1], off[1], strict=True))
        assert _all_differ(on[1])


def test_combined_1f1b_drops_differently_on_each_part_of_a_sequence():
    """The schedule calls layers without the block, which would fork the tensor-parallel stream."""
    world_size, sizes = LAYOUTS["tp2ep2"]
    training = Training(experts=EXPERTS, moe=DROPPING, precision="bf16-mixed")
    strategy = {**sizes, "micro_batch_size": 1, "overlap_moe": "1f1b"}
    ranks = run_ranks(_fit_dropping, world_size, world_size, [(strategy, training)])
    (((one, ones), *_), ((two, twos), *_)) = ranks
    assert one.losses == two.losses
    assert len(ones) == len(twos) == STEPS * GLOBAL_BATCH * 13
    assert _all_differ(ones + twos)


# ------------------------------------------------------------------------- gradient norm


class UnmarkedExperts(ParityGPT):
    """Its experts do not mark their weights as split, as those of a user need not."""

    def make_chunk(self, stage: Any, **fields: Any) -> Any:
        chunk = super().make_chunk(stage, **fields)
        for param in chunk.parameters():
            if not getattr(param, "allreduce", True):
                param.tensor_model_parallel = False
        return chunk


def _fit_unmarked(training: Training) -> Outcome:
    strategy = MCoreStrategy(tp=2, ep=2, etp=1, micro_batch_size=1)
    data = token_dataset(training.samples)
    return fit(UnmarkedExperts(training), data, 2, 1, strategy, training)


def test_gradient_norm_counts_experts_of_every_tensor_parallel_rank():
    """Before 0.19 the engine takes unmarked experts for copies (``mark_expert_parameters``)."""
    training = next(c.training for c in CASES if str(c) == "tp2ep2-balanced-allgather")
    for outcome in run_ranks(_fit_unmarked, 2, training):
        expected = one_process()[training].reference
        assert outcome.grad_norms == pytest.approx(expected.grad_norms, rel=1e-4)
        assert outcome.losses == pytest.approx(expected.losses, abs=1e-5)
