"""TransformerEngine's attention under context parallelism: losses and norms of one GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
from torch import nn

from lightning_mcore import Topology
from lightning_mcore.testing import run_ranks
from tests.gpu.gpus import needs_gpus
from tests.gpu.te_gpt import STEPS, TEGPT, te_train

pytestmark = [pytest.mark.slow, needs_gpus(2)]


def train(devices: int, strategy: dict[str, Any]) -> tuple[Any, Any]:
    seen = te_train(devices, strategy)
    return seen.steps, seen.validation


@pytest.fixture(scope="module")
def one_gpu():
    return run_ranks(train, 1, 1, {}, timeout_s=300)[0]


def check(ranks: Any, one_gpu: Any) -> None:
    """bf16: a wrong factor (of cp, 2) or order of tokens is far outside."""
    expected_steps, expected_validation = one_gpu
    assert len(expected_steps) == STEPS
    for steps, validation in ranks:
        for (loss, norm), (expected, expected_norm) in zip(steps, expected_steps, strict=True):
            assert math.isfinite(loss)
            assert loss == pytest.approx(expected, abs=2e-2)
            assert norm == pytest.approx(expected_norm, rel=5e-2)
        assert validation == pytest.approx(expected_validation, abs=2e-2)


@pytest.mark.parametrize("kind", ["p2p", "all_gather", "a2a"])
def test_cp2(kind, one_gpu):
    check(run_ranks(train, 2, 2, {"cp": 2, "cp_comm_type": kind}, timeout_s=300), one_gpu)


@needs_gpus(4)
@pytest.mark.parametrize(
    "strategy",
    [
        {"cp": 2, "tp": 2},
        {"cp": 2, "pp": 2},
        # Two copies, which draw the same data here: the means over tokens are the same.
        {"cp": 2, "use_distributed_optimizer": True},
        {"cp": 4},
        # Two levels: 2 ranks exchange heads, 2 such pairs form the ring.
        {
            "cp": 4,
            "cp_comm_type": "a2a+p2p",
            "topology": Topology(gpus_per_nvlink_domain=2, gpus_per_node=4),
        },
    ],
    ids=["tp2", "pp2", "dp2", "cp4", "hierarchical"],
)
def test_four_gpus(strategy, one_gpu):
    check(run_ranks(train, 4, 4, strategy, timeout_s=300), one_gpu)


class Unaware(TEGPT):
    """Leaves the exchange out, as if attention saw one rank's tokens only."""

    def make_chunk(self, stage: Any, **fields: Any) -> nn.Module:
        chunk = super().make_chunk(stage, **fields)
        for module in chunk.modules():
            if hasattr(module, "set_context_parallel_group"):
                module.set_context_parallel_group(None, None, None, "p2p")
        return chunk


def train_unaware() -> Any:
    return te_train(2, {"cp": 2}, module=Unaware()).steps


def test_the_exchange_matters(one_gpu):
    """Tolerances mean something: without it the losses differ by more."""
    steps = run_ranks(train_unaware, 2, timeout_s=300)[0]
    worst = max(abs(loss - other) for (loss, _), (other, _) in zip(steps, one_gpu[0], strict=True))
    assert worst > 4e-2
