"""The run header, as the user reads it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from lightning_mcore.config import ParallelSizes, SwitchRequest
from lightning_mcore.header import WIDTH, Batch, Difference, format_header
from lightning_mcore.layout import resolve_layout
from lightning_mcore.switches import PRECISIONS, Facts, plan_switches, resolve_switches
from lightning_mcore.topology import Topology

VERSIONS = {
    "lightning-mcore": "0.1.0",
    "megatron-core": "0.16.1",
    "torch": "2.13.0",
    "lightning": "2.6.6",
}
CPU: dict[str, Any] = {
    "engine_version": (0, 16, 1),
    "on_gpu": False,
    "precision": "32-true",
    "native_model": False,
    "optimizer": "adamw",
}
GPU = CPU | {"on_gpu": True, "precision": "bf16-mixed", "has_te_or_apex": True}


def _header(
    world: int,
    sizes: dict[str, Any],
    facts: dict[str, Any],
    request: dict[str, Any] | None = None,
    batch: Batch | None = None,
    **rest: Any,
) -> str:
    layout = resolve_layout(ParallelSizes(**sizes), world, 0)
    known = Facts(**facts)
    return format_header(
        versions=VERSIONS,
        layout=layout,
        facts=known,
        switches=resolve_switches(SwitchRequest(**(request or {})), layout, known),
        batch=batch or Batch(micro_batch_size=None),
        **rest,
    )


def _rows(header: str) -> dict[str, str]:
    """Rows by first word, folded lines joined again."""
    rows: dict[str, str] = {}
    word = ""
    for line in header.splitlines():
        if line.startswith("     "):
            rows[word] += " " + line.strip()
        else:
            word, _, text = line.strip().partition(" ")
            rows[word] = text.strip()
    return rows


DEMO = """\
lightning-mcore 0.1.0 | megatron-core 0.16.1 | torch 2.13.0 | lightning 2.6.6
  layout       tp 2 x pp 2 x dp 1 = 4 ranks on CPU; 4 stages, vpp 2: 2 on each rank
  batch        micro_batch_size 2 x num_microbatches 4 x dp 1 = 8 samples per optimizer step
  precision    32-true: fp32 parameters, gradients reduced in fp32, optimizer updates fp32
               parameters
  parameters   1,234,567, at most 345,678 on a rank
  switch                               effective  requested  reason
  sequence_parallel                    on         auto       tp = 2 [doc]
  tp_comm_overlap                      off        auto       needs GPUs: it copies between their
                                                             memories [assert]
  overlap_grad_reduce                  off        auto       dp = 1: nothing to reduce
  overlap_param_gather                 off        auto       use_distributed_optimizer is off
  align_param_gather                   off        -          overlap_param_gather is off
  use_distributed_optimizer            off        auto       dp = 1: nothing to shard
  num_distributed_optimizer_instances  1          -          the shards are spread over all copies
  bucket_size                          -          -          one bucket: overlap_grad_reduce is off
  grad_reduce_in_fp32                  off        auto       32-true: gradients are fp32 already
  average_in_collective                off        auto       ranks scale before the sum
  nccl_ub                              off        auto       needs GPUs [assert]
  overlap_p2p                          on         on         requested
  overlap_p2p_warmup_flush             off        auto       helps where warm-up and flush wait for
                                                             the network: measure it on and off
                                                             [candidate]
  batch_p2p                            off        auto       excluded by overlap_p2p [assert]
  batch_p2p_sync                       off        auto       batch_p2p is off
  microbatch_group_size_per_vp_stage   2          -          the engine's rule: pp = 2
  deallocate_pipeline_outputs          off        -          on CPU a send may still be reading the
                                                             tensor [assert]
  defer_embedding_wgrad                off        auto       needs GPUs with Apex [assert]
  gradient_accumulation_fusion         off        auto       needs GPUs [assert]
  cuda_graphs                          off        auto       needs GPUs [assert]
  cp_comm_type                         -          -          cp = 1
  hierarchical_context_parallel_sizes  -          -          only for cp_comm_type='a2a+p2p'
  nccl_communicators                   -          -          NCCL's own choice
  high_priority_streams                -          -          no group named"""


def test_the_demo_header_in_full() -> None:
    header = _header(
        4,
        {"tp": 2, "pp": 2, "vpp": 2},
        CPU,
        {"overlap_p2p": True},
        Batch(micro_batch_size=2, samples=8),
        num_parameters=1_234_567,
        num_parameters_per_rank=345_678,
    )
    assert header == DEMO


@pytest.mark.parametrize(
    ("world", "sizes", "facts", "text"),
    [
        (1, {}, CPU, "tp 1 x pp 1 x dp 1 = 1 rank on CPU"),
        (8, {"tp": 2, "pp": 2}, GPU, "tp 2 x pp 2 x dp 2 = 8 ranks on GPU; 2 stages"),
        (
            4,
            {"tp": 2, "ep": 2, "etp": 1},
            CPU,
            "tp 2 x pp 1 x dp 2 = 4 ranks on CPU; experts: ep 2 x etp 1, 2 copies of each",
        ),
    ],
)
def test_layout_row(world: int, sizes: dict[str, Any], facts: dict[str, Any], text: str) -> None:
    assert _rows(_header(world, sizes, facts))["layout"] == text


@pytest.mark.parametrize(
    ("world", "sizes", "batch", "text"),
    [
        (
            2,
            {},
            Batch(micro_batch_size=None, samples=4),
            "micro_batch_size 4 x num_microbatches 1 x dp 2 = 8 samples per optimizer step",
        ),
        (
            2,
            {},
            Batch(micro_batch_size=2, samples=4, accumulate_grad_batches=3),
            "micro_batch_size 2 x num_microbatches 2 x accumulate_grad_batches 3 x dp 2"
            " = 24 samples per optimizer step",
        ),
        (
            1,
            {},
            Batch(micro_batch_size=None, samples=1),
            "micro_batch_size 1 x num_microbatches 1 x dp 1 = 1 sample per optimizer step",
        ),
        (
            2,
            {"pp": 2},
            Batch(micro_batch_size=None, samples=4),
            "micro_batch_size 1 x num_microbatches 4 x dp 1 = 4 samples per optimizer step",
        ),
        (
            1,
            {},
            Batch(micro_batch_size=None),
            "micro_batch_size = the whole batch, known at the first batch; x dp 1 per optimizer"
            " step",
        ),
        (
            2,
            {"pp": 2},
            Batch(micro_batch_size=3, accumulate_grad_batches=2),
            "num_microbatches = batch size / micro_batch_size (3), known at the first batch;"
            " x accumulate_grad_batches 2 x dp 1 per optimizer step",
        ),
        (
            2,
            {"pp": 2, "vpp": 2},
            Batch(micro_batch_size=None),
            "num_microbatches = batch size / micro_batch_size (1), a multiple of pp (2), known at"
            " the first batch; x dp 1 per optimizer step",
        ),
    ],
)
def test_batch_row(world: int, sizes: dict[str, Any], batch: Batch, text: str) -> None:
    assert _rows(_header(world, sizes, CPU, batch=batch))["batch"] == text


@pytest.mark.parametrize(
    ("cp", "per_token_loss", "text"),
    [
        (1, False, None),
        (1, True, "mean over the tokens that steps count as `num_tokens`, in the whole batch"),
        (2, True, "mean over the tokens that steps count as `num_tokens`, in the whole batch"),
        (2, False, "each of the 2 parts of a sequence counts alike; if a mask leaves them unequal"
         " numbers of tokens, use per_token_loss=True"),
    ],
)  # fmt: skip
def test_loss_row(cp: int, per_token_loss: bool, text: str | None) -> None:
    batch = Batch(micro_batch_size=1, per_token_loss=per_token_loss)
    assert _rows(_header(cp, {"cp": cp}, CPU, batch=batch)).get("loss") == text


@pytest.mark.parametrize(
    ("precision", "native", "text"),
    [
        ("32-true", True, "fp32 parameters, gradients reduced in fp32, optimizer updates fp32"),
        ("bf16-mixed", False, "bf16 parameters, gradients reduced in fp32, optimizer updates fp32"
         " main parameters"),
        ("bf16-true", False, "bf16 parameters, gradients reduced in bf16, optimizer updates bf16"
         " parameters"),
        ("16-mixed", False, "fp16 parameters, gradients reduced in fp32, optimizer updates fp32"
         " main parameters, dynamic loss scale"),
        ("bf16-mixed", True, "fp32 parameters, computing in bf16 by autocast, gradients reduced in"
         " fp32"),
        ("16-mixed", True, "fp32 parameters, computing in fp16 by autocast, gradients reduced in"
         " fp32, dynamic loss scale"),
    ],
)  # fmt: skip
def test_precision_row(precision: str, native: bool, text: str) -> None:
    facts = CPU | {"precision": precision, "native_model": native}
    assert _rows(_header(1, {}, facts))["precision"].startswith(f"{precision}: {text}")


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ({}, None),
        ({"num_parameters": 1000}, "1,000"),
        (
            {"num_parameters": 1000, "num_parameters_per_rank": 600},
            "1,000, at most 600 on a rank",
        ),
    ],
)
def test_parameters_row(counts: dict[str, int], text: str | None) -> None:
    assert _rows(_header(1, {}, CPU, **counts)).get("parameters") == text


def test_environment_row() -> None:
    text = "CUDA_DEVICE_MAX_CONNECTIONS 1"
    assert _rows(_header(2, {}, GPU, environment=text))["environment"] == text
    assert "environment" not in _rows(_header(2, {}, GPU))


def test_differences_are_listed_as_given_and_effective() -> None:
    header = _header(
        1,
        {},
        CPU,
        differences=[
            Difference(field="ddp.bucket_size", given=1000, effective=None),
            Difference(field="optimizer.optimizer", given="sgd", effective="adam"),
        ],
    )
    assert header.splitlines()[-3:] == [
        "  your engine settings that were changed",
        "    ddp.bucket_size:     1000 -> None",
        "    optimizer.optimizer: 'sgd' -> 'adam'",
    ]
    assert "changed" not in _header(1, {}, CPU)


def test_every_switch_has_a_row_with_value_request_and_reason() -> None:
    rows = _rows(_header(2, {}, CPU, {"overlap_param_gather": False, "bucket_size": 5000}))
    assert rows["overlap_param_gather"].split() == ["off", "off", "requested"]
    assert rows["overlap_grad_reduce"].split() == ["on", "auto", "dp", "=", "2", "[recipe]"]
    assert rows["bucket_size"].split() == ["5,000", "5,000", "requested"]
    assert rows["align_param_gather"].split(maxsplit=2)[:2] == ["off", "-"]


def test_groups_are_placed_where_the_machines_are_known() -> None:
    facts = GPU | {"topology": Topology(nodes=128, network="infiniband")}
    rows = _rows(_header(1024, {"tp": 8, "pp": 8}, facts))
    assert rows["machines"] == (
        "128 nodes x 8 hopper GPUs, 8 in an NVLink domain, joined by infiniband network (stated)"
    )
    assert rows["groups"] == (
        "tp: inside the NVLink domain; dp: crosses nodes (16); pp: crosses nodes (8)"
    )
    assert "machines" not in _rows(_header(8, {}, GPU))


def test_warnings_are_told_and_candidates_are_in_the_table() -> None:
    facts = GPU | {"topology": Topology(nodes=2)}
    layout = resolve_layout(ParallelSizes(tp=16), 16, 0)
    _, findings = plan_switches(SwitchRequest(), layout, Facts(**facts))
    header = _header(16, {"tp": 16}, facts, findings=findings)
    assert _rows(header)["warning"].endswith("[tp-leaves-nvlink]")
    assert "[candidate]" in _rows(header)["nccl_ub"]


@pytest.mark.parametrize("sizes", [{}, {"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2, "vpp": 2}])
def test_lines_fit_and_are_plain_text(sizes: dict[str, Any]) -> None:
    for base, precision, native in itertools.product([CPU, GPU], PRECISIONS, [True, False]):
        facts = base | {"precision": precision, "native_model": native}
        header = _header(8, sizes, facts, num_parameters=70_000_000_000)
        for line in header.splitlines():
            assert len(line) <= WIDTH
            assert line == line.rstrip()
            assert line.isascii()
        assert len(header.splitlines()) <= 50
