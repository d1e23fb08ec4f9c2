"""CUDA graphs of layers that communicate or compute in fp8: the same training as without graphs.

Each case has ranks of its own, since buffers of userbuffers and states of fp8 live as long as a
process does.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from lightning_mcore.testing import run_ranks
from tests.gpu.gpus import needs_gpus
from tests.gpu.te_gpt import LAYERS, TEGPT, te_train

pytestmark = pytest.mark.slow

STEPS = 8
FP8 = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
EXPERTS = {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 256,
    "moe_grouped_gemm": True,
    "moe_router_dtype": "fp32",
    "add_bias_linear": False,
    "cuda_graph_modules": ["attn"],
}
SPLIT = {"tp": 2, "sequence_parallel": True}
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tp": (SPLIT, {}),
    "userbuffers": ({**SPLIT, "tp_comm_overlap": True}, {}),
    "tp in fp8": (SPLIT, FP8),
    "cp": ({"cp": 2, "cp_comm_type": "p2p"}, {}),
    "ep": ({"ep": 2}, EXPERTS),
    "chunks": ({"pp": 2, "vpp": 2, "overlap_p2p": True}, {"num_layers": 4}),
}
"""Arguments of the strategy, and fields of TransformerConfig."""


def plain_and_graphed(
    devices: int, kind: str, settings: dict[str, Any], dims: dict[str, Any]
) -> list[Any]:
    runs = (
        te_train(devices, {**settings, **graphs}, module=TEGPT(**dims), steps=STEPS)
        for graphs in ({}, {"cuda_graphs": kind})
    )
    return [(seen.steps, seen.validation, seen.graphs) for seen in runs]


def check(ranks: list[list[Any]]) -> None:
    """Graphs replay the very kernels, so that only the order of atomic sums can differ."""
    for (plain, validation, none), (graphed, graphed_validation, graphs) in ranks:
        assert none == 0
        assert graphs >= 2 * LAYERS  # a pipeline has them for each microbatch in flight
        assert len(plain) == len(graphed) == STEPS
        for (loss, norm), (graphed_loss, graphed_norm) in zip(plain, graphed, strict=True):
            assert math.isfinite(loss)
            assert norm > 1e-3
            assert graphed_loss == pytest.approx(loss, rel=5e-3), (plain, graphed)
            assert graphed_norm == pytest.approx(norm, rel=1e-2), (plain, graphed)
        assert graphed_validation == pytest.approx(validation, rel=5e-3)


@needs_gpus(1)
@pytest.mark.parametrize("kind", ["local", "transformer_engine"])
def test_fp8(kind):
    check(run_ranks(plain_and_graphed, 1, 1, kind, {}, FP8, timeout_s=180))


@needs_gpus(2)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind)
        for name in PAIRS
        for kind in ("local", "transformer_engine")
        if (name, kind) not in {("ep", "local"), ("chunks", "local")}  # which are refused
    ],
)
def test_pairs_of_gpus(name, kind):
    check(run_ranks(plain_and_graphed, 2, 2, kind, *PAIRS[name], timeout_s=180))
