"""Userbuffers on real GPUs: the same training as without, and mistakes that are caught."""

from __future__ import annotations

import os
from typing import Any

import pytest

from lightning_mcore import ConfigurationError, GemmOverlap, TPCommOverlap
from lightning_mcore.testing import run_ranks
from tests.gpu.gpus import needs_gpus
from tests.gpu.te_gpt import BATCH, STEPS, TEGPT, te_train

pytestmark = [pytest.mark.slow, needs_gpus(2, own=True)]

SPLIT = {"tp": 2, "sequence_parallel": True}
RING = GemmOverlap(method="ring_exchange")

SETTINGS: dict[str, Any] = {
    "rings": True,
    "TransformerEngine's own": TPCommOverlap(),
    "bulk only": TPCommOverlap(all_gather=False, reduce_scatter=False),
    "ring reduce-scatter": TPCommOverlap(gemms={"proj_fprop": RING, "fc2_fprop": RING}),
    "two splits": TPCommOverlap(
        gemms={
            name: GemmOverlap(method="pipeline", num_splits=2)
            for name in ("proj_fprop", "fc2_fprop")
        }
    ),
    "scattering dgrad": TPCommOverlap(gemms={"qkv_dgrad": RING, "fc1_dgrad": RING}),
}


def train(overlap: Any) -> Any:
    seen = te_train(2, {**SPLIT, "tp_comm_overlap": overlap})
    return seen.steps, seen.validation, os.environ.get("UB_SKIPMC")


@pytest.fixture(scope="module")
def without():
    return run_ranks(train, 2, False, timeout_s=300)[0]


@pytest.mark.parametrize("name", SETTINGS)
def test_as_without(name, without):
    for steps, validation, skipmc in run_ranks(train, 2, SETTINGS[name], timeout_s=300):
        assert len(steps) == STEPS
        for (loss, norm), (expected, expected_norm) in zip(steps, without[0], strict=True):
            assert loss == pytest.approx(expected, abs=2e-3)
            assert norm == pytest.approx(expected_norm, rel=1e-2)
        assert validation == pytest.approx(without[1], abs=2e-3)
        if os.environ.get("NCCL_NVLS_ENABLE") == "0":
            assert skipmc == "1"


FP8 = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}


def train_fp8(overlap: Any) -> Any:
    return te_train(2, {**SPLIT, "tp_comm_overlap": overlap}, module=TEGPT(**FP8)).steps


def test_fp8(without):
    """Buffers that hold fp8; a model in fp8 follows the one in bf16."""
    plain = run_ranks(train_fp8, 2, False, timeout_s=300)[0]
    for (loss, _), (in_bf16, _) in zip(plain, without[0], strict=True):
        assert loss == pytest.approx(in_bf16, abs=5e-2)
    assert [loss for loss, _ in plain] != [loss for loss, _ in without[0]]
    for steps in run_ranks(train_fp8, 2, TPCommOverlap(quantization="fp8"), timeout_s=300):
        for (loss, norm), (expected, expected_norm) in zip(steps, plain, strict=True):
            assert loss == pytest.approx(expected, abs=2e-2)
            assert norm == pytest.approx(expected_norm, rel=5e-2)


def mistake(name: str) -> str:
    options: dict[str, Any] = {**SPLIT, "tp_comm_overlap": True}
    extra: dict[str, Any] = {}
    if name == "validation":
        extra = {"validation": BATCH + 1}
    elif name == "fp8":
        options["tp_comm_overlap"] = TPCommOverlap(quantization="fp8")
    try:
        te_train(2, options, **extra)
    except ConfigurationError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("validation", "A microbatch of 1 x 256 tokens does not fit"),
        ("fp8", "must be 'none'"),
    ],
)
def test_mistakes(name, message):
    for seen in run_ranks(mistake, 2, name, timeout_s=300):
        assert message in seen


def train_twice() -> Any:
    first = te_train(2, {**SPLIT, "tp_comm_overlap": True}).steps
    second = te_train(2, {**SPLIT, "tp_comm_overlap": True}).steps
    try:
        te_train(2, {**SPLIT, "tp_comm_overlap": SETTINGS["ring reduce-scatter"]})
    except ConfigurationError as error:
        return first, second, str(error)
    return first, second, "no error"


def test_one_set_up_per_process():
    """An equal second run uses the buffers that are there; another kind is refused."""
    for first, second, message in run_ranks(train_twice, 2, timeout_s=300):
        assert "once per process" in message
        for (loss, _), (again, _) in zip(first, second, strict=True):
            assert again == pytest.approx(loss, abs=2e-3)
