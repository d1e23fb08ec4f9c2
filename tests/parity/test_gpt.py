"""A Megatron GPT in every layout against one process: same weights, same global batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.gpt import token_dataset
from tests.parity.layouts import check_batches, check_steps, fit_gpt
from tests.parity.one_process import gpt_reference
from tests.parity.recipes import Training
from tests.parity.weights import check_shards

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp2": (2, {}),
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "pp2vpp2": (2, {"pp": 2, "vpp": 2, "overlap_p2p": True}),
    "tp2pp2": (4, {"tp": 2, "pp": 2}),
    "tp2pp2vpp2": (4, {"tp": 2, "pp": 2, "vpp": 2}),
    "tp2dp2": (4, {"tp": 2}),
    "pp2dp2": (4, {"pp": 2}),
    "pp2vpp2dp2": (4, {"pp": 2, "vpp": 2}),
    "pp4": (4, {"pp": 4}),
    "ep2": (2, {"ep": 2}),
    "ep2dp4": (4, {"ep": 2}),
    "tp2ep2": (4, {"tp": 2, "ep": 2, "etp": 1}),
    "tp2etp2": (2, {"tp": 2, "etp": 2}),
    "pp2ep2": (4, {"pp": 2, "ep": 2}),
}
"""Processes and sizes."""

NO_OVERLAP = {"overlap_grad_reduce": False, "overlap_param_gather": False}
ALL_OVERLAP = {
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "use_distributed_optimizer": True,
}
SMALL_BUCKETS = {"bucket_size": 4000}
"""The model has 57,000 parameters: a dozen buckets."""


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    layout: str
    about: str
    switches: dict[str, Any] = field(default_factory=dict, hash=False)
    training: Training = field(default_factory=Training)

    def __str__(self) -> str:
        return f"{self.layout}-{self.about}"


FP32 = [
    Case("one", "plain"),
    Case("one", "2-microbatches-tied-clip", {"micro_batch_size": 4}, Training(True, clip=0.5)),
    Case("one", "distopt-groups", ALL_OVERLAP, Training(optimizer="groups")),
    # Data parallel.
    Case("dp2", "auto"),
    Case("dp2", "no-overlap-no-distopt", {**NO_OVERLAP, "use_distributed_optimizer": False}),
    Case("dp2", "buckets-tied-2mb", {**ALL_OVERLAP, **SMALL_BUCKETS, "micro_batch_size": 2},
         Training(True)),
    Case("dp2", "buckets-no-distopt-accumulate",
         {**SMALL_BUCKETS, "use_distributed_optimizer": False}, Training(accumulate=2)),
    Case("dp2", "distopt-accumulate-clip-4mb", {**ALL_OVERLAP, "micro_batch_size": 1},
         Training(accumulate=2, clip=0.5)),
    Case("dp2", "distopt-no-gather-overlap-groups",
         {**SMALL_BUCKETS, "overlap_param_gather": False}, Training(optimizer="groups")),
    Case("dp2", "sgd-tied", {}, Training(True, optimizer="sgd")),
    Case("dp2", "adam-l2", {}, Training(optimizer="adam_l2")),
    Case("dp2", "clip-by-value", {}, Training(clip=1e-3, clip_algorithm="value")),
    Case("dp2", "rmsprop", {}, Training(optimizer="rmsprop", clip=0.5)),
    # Tensor parallel.
    Case("tp2", "sequence-parallel-tied", {"sequence_parallel": True}, Training(True)),
    Case("tp2", "no-sequence-parallel-clip", {"sequence_parallel": False}, Training(clip=0.5)),
    Case("tp2", "2mb-sgd-accumulate", {"micro_batch_size": 4},
         Training(optimizer="sgd", accumulate=2)),
    Case("tp2", "adagrad-clip", {}, Training(optimizer="adagrad", clip=0.5)),
    # Pipelines.
    Case("pp2", "4mb-tied", {"micro_batch_size": 2}, Training(True)),
    Case("pp2", "2mb-clip-embedding-group", {"micro_batch_size": 4},
         Training(optimizer="embedding_group", clip=0.5)),
    Case("pp2", "8mb-adam-accumulate", {}, Training(optimizer="adam", accumulate=2)),
    Case("pp2vpp2", "4mb-tied-clip", {"micro_batch_size": 2}, Training(True, clip=0.5)),
    Case("pp2vpp2", "2mb-groups", {"micro_batch_size": 4}, Training(optimizer="groups")),
    Case("pp4", "4mb-tied", {"micro_batch_size": 2}, Training(True)),
    # Two axes.
    Case("tp2pp2", "2mb-tied-no-sequence-parallel",
         {"micro_batch_size": 4, "sequence_parallel": False}, Training(True)),
    Case("tp2pp2", "4mb-adam-l2-clip", {"micro_batch_size": 2},
         Training(optimizer="adam_l2", clip=0.5)),
    Case("tp2pp2vpp2", "4mb-tied", {"micro_batch_size": 2, "overlap_p2p": True}, Training(True)),
    Case("tp2dp2", "overlap-buckets-tied", {**ALL_OVERLAP, **SMALL_BUCKETS}, Training(True)),
    Case("tp2dp2", "no-overlap-2mb-groups-clip", {**NO_OVERLAP, "micro_batch_size": 2},
         Training(optimizer="groups", clip=0.5)),
    Case("pp2dp2", "overlap-buckets-tied-4mb",
         {**ALL_OVERLAP, **SMALL_BUCKETS, "micro_batch_size": 1}, Training(True)),
    Case("pp2dp2", "no-overlap-sgd-2mb", {**NO_OVERLAP, "micro_batch_size": 2},
         Training(optimizer="sgd")),
    Case("pp2dp2", "distopt-accumulate-tied", {**ALL_OVERLAP, "micro_batch_size": 2},
         Training(True, accumulate=2)),
    Case("pp2vpp2dp2", "overlap-buckets-accumulate",
         {**ALL_OVERLAP, **SMALL_BUCKETS, "micro_batch_size": 2}, Training(accumulate=2)),
    Case("pp2vpp2dp2", "no-distopt-tied-clip",
         {"use_distributed_optimizer": False, "micro_batch_size": 1}, Training(True, clip=0.5)),
    # Experts.
    Case("ep2", "auto", {}, Training(experts=4)),
    Case("ep2", "overlap-buckets-groups-clip", {**ALL_OVERLAP, **SMALL_BUCKETS},
         Training(experts=4, optimizer="groups", clip=0.5)),
    Case("ep2", "clip-by-value", {}, Training(experts=4, clip=1e-3, clip_algorithm="value")),
    Case("ep2", "rmsprop-clip", {}, Training(experts=4, optimizer="rmsprop", clip=0.5)),
    Case("ep2dp4", "2mb-no-overlap", {**NO_OVERLAP, "micro_batch_size": 1}, Training(experts=4)),
    Case("tp2ep2", "accumulate", {}, Training(experts=4, accumulate=2)),
    Case("tp2etp2", "2mb", {"micro_batch_size": 4}, Training(experts=4)),
    Case("pp2ep2", "2mb", {"micro_batch_size": 2}, Training(experts=4)),
]  # fmt: skip

BF16 = [
    Case("dp2", "distopt", ALL_OVERLAP, Training(precision="bf16-mixed")),
    Case("dp2", "no-distopt-tied", {"use_distributed_optimizer": False},
         Training(True, precision="bf16-mixed")),
    Case("dp2", "true", {}, Training(precision="bf16-true")),
    Case("tp2", "clip", {}, Training(precision="bf16-mixed", clip=0.5)),
    Case("pp2vpp2", "tied", {"micro_batch_size": 2}, Training(True, precision="bf16-mixed")),
    Case("pp2dp2", "accumulate", {"micro_batch_size": 2},
         Training(accumulate=2, precision="bf16-mixed")),
]  # fmt: skip


def _trained(case: Case):
    world_size, sizes = LAYOUTS[case.layout]
    asked = {**sizes, **case.switches}
    reference = gpt_reference(case.training)
    ranks = fit_gpt(world_size, asked, case.training)
    for outcome in ranks:
        # What the row says is what ran.
        for name, value in asked.items():
            assert outcome.switches.get(name, value) == value
    check_batches(ranks, token_dataset(case.training.samples))
    return ranks, reference


@pytest.mark.parametrize("case", FP32, ids=str)
def test_fp32(case):
    ranks, reference = _trained(case)
    check_steps(ranks, reference)
    check_shards([outcome.shards for outcome in ranks], reference.parameters, 1e-5)


@pytest.mark.parametrize("case", BF16, ids=str)
def test_bf16(case):
    ranks, reference = _trained(case)
    check_steps(ranks, reference, loss=2e-2, norm=2e-2)
    check_shards([outcome.shards for outcome in ranks], reference.parameters, 2e-2)


@pytest.mark.parametrize("experts", [None, 4])
def test_training_moves_what_is_compared(experts):
    """Tolerances mean something: five steps change losses and parameters far more than they."""
    reference = gpt_reference(Training(experts=experts))
    assert reference.losses[0] - reference.losses[-1] > 1e-2
    other = gpt_reference(Training(experts=experts, optimizer="groups"))
    assert set(other.parameters) == set(reference.parameters)
    for key, tensor in reference.parameters.items():
        assert (tensor - other.parameters[key]).abs().max() > 1e-3, key
