"""Every switch on and off, and sampled combinations, against one process.

Many fits share the ranks of one start, since starting costs more than training the small model.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from lightning_mcore._mcore import engine
from lightning_mcore.config import ParallelSizes, SwitchRequest
from lightning_mcore.layout import resolve_layout
from lightning_mcore.switches import Facts, validate
from lightning_mcore.testing import run_ranks
from lightning_mcore.version import installed_version
from tests.parity.layouts import Outcome, check_steps, fit_on_rank
from tests.parity.one_process import gpt_reference
from tests.parity.recipes import STEPS, Training
from tests.parity.weights import check_shards

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "pp2vpp2": (2, {"pp": 2, "vpp": 2}),
    "pp2vpp2dp2": (4, {"pp": 2, "vpp": 2}),
}
SIZE_NAMES = ("tp", "pp", "vpp")

BUCKETS = {"bucket_size": 4000}
"""The model has 57,000 parameters: a dozen buckets."""

# Each switch appears on and off.
CHOSEN: dict[str, list[dict[str, Any]]] = {
    "dp2": [
        {"comm": "safe"},
        {"comm": "max", **BUCKETS},
        {"grad_reduce_in_fp32": True, "average_in_collective": True, "micro_batch_size": 2},
        {"overlap_param_gather": False, "use_distributed_optimizer": True, **BUCKETS},
    ],
    "tp2": [{"comm": "safe", "sequence_parallel": False}, {"comm": "max"}],
    "pp2": [
        {"comm": "safe", "micro_batch_size": 2},
        {"batch_p2p": False, "micro_batch_size": 1},
    ],
    "pp2vpp2": [
        {"comm": "safe", "micro_batch_size": 2},
        {"comm": "max", "micro_batch_size": 1},
        {"microbatch_group_size_per_vp_stage": 3, "micro_batch_size": 1},
        {"overlap_p2p_warmup_flush": True, "microbatch_group_size_per_vp_stage": 4,
         "micro_batch_size": 1},
        {"overlap_p2p": False, "batch_p2p": False, "micro_batch_size": 2},
    ],
    "pp2vpp2dp2": [
        {"comm": "safe"},
        {"comm": "max", **BUCKETS},
        {"overlap_param_gather": True, "use_distributed_optimizer": True, **BUCKETS},
        {"overlap_param_gather": False, "microbatch_group_size_per_vp_stage": 4},
    ],
}  # fmt: skip

VALUES: dict[str, list[Any]] = {
    "comm": ["safe", "auto", "max"],
    "sequence_parallel": [True, False, "auto"],
    "tp_comm_overlap": [False, "auto"],
    "overlap_grad_reduce": [True, False, "auto"],
    "overlap_param_gather": [True, False, "auto"],
    "use_distributed_optimizer": [True, False, "auto"],
    "bucket_size": [None, 4000],
    "grad_reduce_in_fp32": [True, False, "auto"],
    "average_in_collective": [True, False, "auto"],
    "overlap_p2p": [True, False, "auto"],
    "overlap_p2p_warmup_flush": [True, False, "auto"],
    "batch_p2p": [True, False, "auto"],
    "batch_p2p_sync": [False, "auto"],
    "microbatch_group_size_per_vp_stage": [None, 2, 4],
    "defer_embedding_wgrad": [False, "auto"],
    "micro_batch_size": [1, 2],
}
SAMPLES_PER_LAYOUT = 2


def _sampled(layout: str) -> list[dict[str, Any]]:
    """Combinations that the validator lets through, drawn alike in every run."""
    draw = random.Random(layout)
    world, sizes = LAYOUTS[layout]
    place = resolve_layout(ParallelSizes(**sizes), world, 0)
    facts = Facts(
        engine_version=engine.engine_version(),
        on_gpu=False,
        precision="32-true",
        native_model=False,
        optimizer="adamw",
        torch_version=installed_version("torch") or (),
    )
    found: list[dict[str, Any]] = []
    while len(found) < SAMPLES_PER_LAYOUT:
        sample = {name: draw.choice(values) for name, values in VALUES.items()}
        findings = validate(SwitchRequest(**sample), place, facts)
        # With two microbatches, a group of four does not fit: what the first batch tells.
        fits = sample["microbatch_group_size_per_vp_stage"] != 4 or sample["micro_batch_size"] == 1
        if fits and not any(finding.severity == "error" for finding in findings):
            found.append(sample)
    return found


def _fit_all(world_size: int, jobs: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[Outcome]:
    return [fit_on_rank(world_size, {**sizes, **asked}, Training()) for sizes, asked in jobs]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_switches_change_no_number(world_size: int) -> None:
    jobs = [
        (sizes, asked)
        for name, (world, sizes) in LAYOUTS.items()
        if world == world_size
        for asked in [*CHOSEN[name], *_sampled(name)]
    ]
    reference = gpt_reference(Training())
    ranks = run_ranks(_fit_all, world_size, world_size, jobs)
    for index, (sizes, asked) in enumerate(jobs):
        outcomes = [results[index] for results in ranks]
        try:
            for outcome in outcomes:
                for name, value in asked.items():
                    if isinstance(value, bool):
                        assert outcome.switches[name] is value
                # Lightning's hook for a batch's end comes after the optimizer's first step.
                aligned = outcome.switches["align_param_gather"]
                assert outcome.starts_gathers == [aligned] * STEPS
            check_steps(outcomes, reference)
            check_shards([outcome.shards for outcome in outcomes], reference.parameters, 1e-5)
        except AssertionError as error:
            raise AssertionError(f"{sizes} with {asked}: {error}") from error
