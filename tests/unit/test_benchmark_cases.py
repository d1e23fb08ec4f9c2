"""The cases of the benchmark for several GPUs, under the rules of the machines they are for."""

from __future__ import annotations

import dataclasses
import importlib
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_mcore import MCoreStrategy, Topology
from lightning_mcore.batch import plan_training
from lightning_mcore.config import ModelDims
from lightning_mcore.experts import setup
from lightning_mcore.experts.values import FlexPackage
from lightning_mcore.prepare import resolve_before_groups
from lightning_mcore.switches import Facts

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "UB_SKIPMC": "1"}


@pytest.fixture
def script(monkeypatch):
    """The script's GROUPS and the models, without what it does to the environment."""
    for name in ("NVSHMEM_DISABLE_NVLS", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "0")
    for name in ("NCCL_NVLS_ENABLE", "UB_SKIPMC", "PYTORCH_NVML_BASED_CUDA_CHECK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    package = FlexPackage(version="1.2.1", has_nvshmem=False)
    monkeypatch.setattr(setup, "probe_deep_ep", lambda: package)
    return importlib.import_module("several_gpus"), importlib.import_module("models")


def resolve(case: Any, dims: Any, world: int) -> Any:
    strategy = MCoreStrategy(
        micro_batch_size=case.micro_batch, seq_length=dims.seq, **case.strategy
    )
    request = dataclasses.replace(
        strategy._request,
        dims=ModelDims(
            num_layers=dims.layers,
            num_attention_heads=dims.heads,
            num_query_groups=dims.query_groups,
            hidden_size=dims.hidden,
            num_moe_experts=dims.experts or None,
            seq_length=dims.seq,
        ),
    )
    facts = Facts(
        engine_version=(0, 19, 2),
        on_gpu=True,
        precision="bf16-mixed",
        native_model=False,
        optimizer="adamw",
        has_te_or_apex=True,
        te_version=(2, 20, 2),
        torch_version=(2, 11, 0),
        dims=request.dims,
        topology=Topology(gpus_per_nvlink_domain=world, gpus_per_node=world, multicast=False),
        environment={**ENVIRONMENT, **case.environment},
    )
    return resolve_before_groups(request, facts, world_size=world, rank=0)


def check(case: Any, plan: Any, dims: Any, world: int, parameters: Any) -> None:
    found = resolve(case, dims, world)
    layout, switches = found.layout, found.switches
    assert layout.dp == case.data_parallel(world)
    if case.strategy.get("tp_comm_overlap") or (
        layout.tp > 1 and case.strategy.get("comm") == "max"
    ):
        assert found.userbuffers is not None
    for count in case.microbatches:
        assert plan.steps_of(case, count) >= 2
        run = plan_training(
            torch.zeros(case.micro_batch * count),
            micro_batch_size=case.micro_batch,
            pp=layout.pp,
            interleaved=layout.vpp is not None,
            group_size=switches.microbatch_group_size_per_vp_stage.effective,
        )
        assert len(run.microbatches) == count
    # What the engine and TransformerEngine ask of dimensions.
    for size in (dims.heads, dims.query_groups, dims.ffn, dims.vocab):
        assert size % layout.tp == 0
    assert dims.layers % (layout.pp * case.vpp) == 0
    assert dims.seq % (2 * layout.cp * layout.tp) == 0
    assert dims.experts % layout.ep == 0
    # Weights in bf16 and gradients in fp32; main weights and two moments in fp32, sharded or not.
    # Twice: a baseline stays beside its variant. The rest is for activations.
    dense = parameters(dataclasses.replace(dims, experts=0, ffn=0) if dims.experts else dims)
    experts = (parameters(dims) - dense) / layout.ep if dims.experts else 0
    shards = layout.dp_cp if switches.use_distributed_optimizer.effective else 1
    own = (dense * (6 + 12 / shards) + experts * 18) / (layout.tp * layout.pp)
    assert 2 * own < 75 * 2**30


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_every_case_can_run_on_gpus(script, devices):
    gpus, models = script
    seen = set()
    for item, make in gpus.GROUPS.items():
        for group, plan in make(devices) if item != "layouts" or devices > 2 else ():
            cases = (group.baseline, *group.variants)
            assert len({case.name for case in cases}) == len(cases)
            for case in cases:
                seen.add((item, group.name, case.name))
                if case.framework == "mcore":
                    dims = dataclasses.replace(models.MODELS[case.model], **case.changes)
                    world = group.world or devices
                    check(case, plan, dims, world, models.parameter_count)
    assert {item for item, *_ in seen} == set(gpus.GROUPS) - (
        {"layouts"} if devices == 2 else set()
    )
    names = [name for _, name, _ in seen]
    assert devices < 4 or f"70B width, 8 layers, tp{devices}" in names


def test_layers_of_experts_have_more_for_the_gpu_than_for_the_host(script):
    """At least 60 ms per layer and microbatch at 500 TFLOP/s."""
    gpus, models = script
    groups = [*gpus.GROUPS["moe"](2), *gpus.GROUPS["layouts"](4)]
    cases = [case for group, _ in groups for case in (group.baseline, *group.variants)]
    cases = [case for case in cases if "ep" in case.strategy]
    assert len(cases) == 8
    for case in cases:
        dims = dataclasses.replace(
            models.MODELS[case.model], **case.changes, batch=case.micro_batch
        )
        ends = dataclasses.replace(dims, layers=0)
        of_a_layer = (models.model_flops(dims) - models.model_flops(ends)) / dims.layers
        assert of_a_layer / 500e12 > 0.06
        assert case.lateness


def test_losses_are_compared_with_the_first_case_of_the_same_weights(script):
    cases, compare = map(importlib.import_module, ("multigpu.cases", "multigpu.compare"))

    def opened(name: str, losses: list[float], **strategy: Any) -> Any:
        case = cases.Case(name=name, model="tiny", strategy=strategy, microbatches=(2, 4))
        return SimpleNamespace(case=case, losses={2: losses, 4: [9.0]})

    def compared(other: Any, count: int = 2) -> dict[str, Any]:
        row: dict[str, Any] = {}
        peers.compare(row, other, count)
        return row

    peers = compare._Peers()
    peers.add(opened("baseline", [3.0, 2.0, 1.0], tp=8))
    # As many steps as both have run; the largest difference.
    assert compared(opened("ring", [3.0, 2.5], tp=8, tp_comm_overlap=True)) == {
        "loss_difference": 0.5,
        "loss_peer": "baseline",
    }
    assert compared(opened("ring", [3.0, 2.5], tp=8), count=4) == {}
    # Other sizes begin with other weights, or other batches.
    assert compared(opened("tp4", [4.0, 3.0], tp=4)) == {}
    assert compared(opened("ep2", [4.0, 3.0], tp=8, ep=2)) == {}
    assert compared(opened("p2p", [4.0, 3.0], tp=4, cp=2)) == {}
    assert compared(opened("a2a", [4.0, 3.25], tp=4, cp=2, cp_comm_type="a2a")) == {
        "loss_difference": 0.25,
        "loss_peer": "p2p",
    }
    assert compared(opened("cp4", [4.0], tp=4, cp=4)) == {}
    assert compared(opened("vpp2", [4.0], pp=2, vpp=2)) == {}


def test_what_the_time_does_not_suffice_for_is_said(script):
    gpus, _ = script
    (group, plan), *_ = gpus.GROUPS["scaling"](2)
    clock = gpus.Clock(time.monotonic(), 0.5)
    results = gpus.Results(None, {})
    bench = gpus.Bench(
        world=1, accelerator="cpu", method="fork", clock=clock, results=results, case_limit_s=9.0
    )
    gpus.run_group(bench, group, plan)
    (row,) = results.content["rows"]
    assert (row["status"], row["case"]) == ("not run", group.baseline.name)
    assert row["reason"].endswith("s were left, and it may take 1 s")
