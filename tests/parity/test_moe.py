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

from lightning_mcore._mcore.cpu import CpuAdapter
from lightning_mcore.testing import run_ranks
from tests.gpt import gpt_chunk, token_dataset
from tests.parity.layouts import biased_routers, check_batches, check_steps, fit_gpt
from tests.parity.one_process import CPU_FIELDS, Reference, gpt_loss
from tests.parity.recipes import OPTIMIZERS, STEPS, Training, global_batch, make_schedule
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
CAPPED = (*BALANCED, ("moe_expert_capacity_factor", 0.75))
PADDED = (*CAPPED, ("moe_pad_expert_input_to_capacity", True))


@dataclass(frozen=True)
class Biases:
    """Router biases after training, by number of the layer."""

    reference: Reference
    biases: dict[int, torch.Tensor]


def _train(training: Training) -> Biases:
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    dist.init_process_group("gloo")
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
        return Biases(Reference(losses, norms, full), biases)


@functools.cache
def one_process(training: Training) -> Biases:
    """The GPT with all experts in one process, in a loop of torch."""
    return run_ranks(_train, 1, training)[0]


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


CASES = [
    Case("one", "balanced", BALANCED),
    Case("ep2", "balanced", BALANCED, clip=0.5),
    Case("ep2dp4", "balanced-accumulate", BALANCED, accumulate=2),
    Case("tp2ep2", "balanced", BALANCED),
    Case("tp2ep2dp2", "balanced-clip", BALANCED, clip=0.5),
    Case("pp2ep2", "balanced-accumulate", BALANCED, accumulate=2),
    Case("pp2vpp2ep2", "balanced", BALANCED),
    Case("tp2etp2", "balanced", BALANCED),
    Case("ep2", "per-sequence", PER_SEQUENCE),
    Case("tp2ep2", "per-sequence", PER_SEQUENCE),
    Case("ep2", "biased", BIASED),
    Case("tp2ep2dp2", "biased-accumulate", BIASED, accumulate=2),
    Case("pp2vpp2ep2", "biased", BIASED),
    Case("ep2dp4", "capped", CAPPED),
    Case("ep4", "padded", PADDED),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_one_process(case):
    training = Training(
        experts=EXPERTS, moe=case.moe, accumulate=case.accumulate, clip=case.clip
    )
    expected = one_process(training)
    world_size, sizes = LAYOUTS[case.layout]
    ranks = fit_gpt(world_size, {**sizes, **case.switches, "micro_batch_size": 1}, training)
    check_batches(ranks, token_dataset(training.samples))
    check_steps(ranks, expected.reference)
    check_shards([rank.shards for rank in ranks], expected.reference.parameters, 1e-5)
    found = {layer for rank in ranks for layer in rank.biases}
    assert found == set(expected.biases)
    for rank in ranks:
        for layer, bias in rank.biases.items():
            assert bias.abs().max() > 0.04
            torch.testing.assert_close(bias, expected.biases[layer], rtol=0, atol=1e-6)
