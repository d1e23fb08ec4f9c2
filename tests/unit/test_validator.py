"""Rules of the validator, with the engine's failure that each prevents where a CPU can show it."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from lightning_mcore import Topology
from lightning_mcore._mcore import engine
from lightning_mcore.config import ModelDims, ParallelSizes, SwitchRequest
from lightning_mcore.engine_fields import ddp_fields, group_fields, model_fields
from lightning_mcore.errors import ConfigurationError
from lightning_mcore.findings import Finding, Findings, raise_errors
from lightning_mcore.layout import resolve_layout
from lightning_mcore.switches import (
    Facts,
    Switches,
    check_graphs_with_experts,
    check_settings,
    plan_switches,
    resolve_switches,
    validate,
)
from lightning_mcore.switches.communicators import GROUP_NAMES

ROOT = Path(__file__).parents[2]
CPU: dict[str, Any] = {
    "engine_version": (0, 19, 2),
    "on_gpu": False,
    "precision": "32-true",
    "native_model": False,
    "optimizer": "adamw",
}
GPU = CPU | {
    "on_gpu": True,
    "precision": "bf16-mixed",
    "has_te_or_apex": True,
    "te_version": (2, 20, 2),
    "torch_version": (2, 11, 0),
    "has_fused_wgrad": True,
}
DP2: tuple[int, dict[str, Any]] = (2, {})
VPP: tuple[int, dict[str, Any]] = (8, {"pp": 4, "vpp": 2})
OFFLOAD = {
    "use_precision_aware_optimizer": True,
    "optimizer_cpu_offload": True,
    "optimizer_offload_fraction": 1.0,
}


def _plan(
    grid: tuple[int, dict[str, Any]], facts: dict[str, Any], **request: Any
) -> tuple[Switches, list[Finding]]:
    layout = resolve_layout(ParallelSizes(**grid[1]), grid[0], 0)
    return plan_switches(SwitchRequest(**request), layout, Facts(**facts))


# (request, (world, sizes), facts, severity, code)
RULES: list[tuple[dict[str, Any], tuple[int, dict[str, Any]], dict[str, Any], str, str]] = [
    ({"tp_comm_overlap": True}, DP2, GPU, "error", "tp-overlap-needs-tp"),
    ({"tp_comm_overlap": True, "sequence_parallel": False}, (2, {"tp": 2}), GPU, "error",
     "tp-overlap-needs-sequence-parallel"),
    ({"tp_comm_overlap": True}, (2, {"tp": 2}), CPU, "error", "tp-overlap-needs-gpu"),
    ({"tp_comm_overlap": True}, (2, {"tp": 2}), GPU | {"te_version": None}, "error",
     "tp-overlap-needs-te"),
    ({"tp_comm_overlap": True}, (2, {"tp": 2}), GPU | {"native_model": True}, "error",
     "tp-overlap-needs-megatron-layers"),
    ({"tp_comm_overlap": True}, (2, {"tp": 2}),
     GPU | {"dims": ModelDims(multi_latent_attention=True)}, "error", "tp-overlap-without-mla"),
    ({"tp_comm_overlap": True}, (16, {"tp": 16}), GPU | {"topology": Topology(nodes=2)}, "error",
     "tp-overlap-needs-nvlink"),
    ({}, (16, {"tp": 16}), GPU | {"topology": Topology(nodes=2)}, "warning", "tp-leaves-nvlink"),
    ({}, (16, {}), GPU | {"topology": Topology()}, "error", "topology-too-small"),
    ({"grad_reduce_in_fp32": True}, DP2, CPU | {"precision": "bf16-true"}, "error",
     "fp32-gradients-need-main-parameters"),
    ({"average_in_collective": True}, DP2, CPU, "error", "average-in-collective-needs-torch"),
    ({"average_in_collective": True}, DP2, GPU | {"per_token_loss": True}, "error",
     "average-in-collective-excludes-per-token-loss"),
    ({"nccl_ub": True}, DP2, CPU, "error", "nccl-ub-needs-gpu"),
    ({"nccl_ub": True}, DP2, GPU | {"environment": {"NCCL_NVLS_ENABLE": "0"}}, "error",
     "nccl-ub-needs-multicast"),
    ({"nccl_ub": True}, DP2, GPU | {"topology": Topology(multicast=False)}, "error",
     "nccl-ub-needs-multicast"),
    ({"nccl_ub": True}, DP2,
     GPU | {"environment": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            "torch_version": (2, 10)}, "error", "nccl-ub-excludes-expandable-segments"),
    ({"fsdp": "optim_grads_params"}, DP2, GPU, "error", "fsdp-not-supported"),
    ({"ddp": {"use_megatron_fsdp": True}}, DP2, GPU, "error", "fsdp-not-supported"),
    ({"overlap_p2p_warmup_flush": True, "overlap_p2p": False}, VPP, CPU, "error",
     "warmup-flush-needs-overlap-p2p"),
    ({"overlap_p2p_warmup_flush": True}, (2, {"pp": 2}), CPU, "error",
     "warmup-flush-needs-overlap-p2p"),
    ({"batch_p2p": True, "overlap_p2p": True}, VPP, CPU, "error", "batch-p2p-excludes-overlap"),
    ({"batch_p2p": True}, DP2, CPU, "error", "batch-p2p-needs-pp"),
    ({"batch_p2p_sync": True}, VPP, CPU, "error", "batch-p2p-sync-needs-batch"),
    ({"batch_p2p": True}, (2, {"pp": 2, "vpp": 2}), CPU, "error", "batched-p2p-wrong-at-pp2"),
    ({"overlap_p2p": False}, (2, {"pp": 2, "vpp": 2}), CPU, "error", "batched-p2p-wrong-at-pp2"),
    ({"microbatch_group_size_per_vp_stage": 4}, (2, {"pp": 2}), CPU, "error",
     "microbatch-group-needs-vpp"),
    ({"microbatch_group_size_per_vp_stage": 3}, VPP, CPU, "error", "microbatch-group-below-pp"),
    ({"defer_embedding_wgrad": True}, DP2, GPU, "error", "defer-embedding-wgrad-needs-pp"),
    ({"defer_embedding_wgrad": True}, VPP, GPU | {"has_fused_wgrad": False}, "error",
     "defer-embedding-wgrad-needs-apex"),
    ({"defer_embedding_wgrad": True}, VPP, CPU, "error", "defer-embedding-wgrad-needs-apex"),
    ({"defer_embedding_wgrad": True}, VPP, GPU | {"native_model": True}, "error",
     "defer-embedding-wgrad-needs-megatron-layers"),
    ({"defer_embedding_wgrad": True, "gradient_accumulation_fusion": False}, VPP, GPU, "error",
     "defer-embedding-wgrad-needs-fusion"),
    ({"gradient_accumulation_fusion": True}, DP2, CPU, "error", "grad-fusion-needs-gpu"),
    ({"gradient_accumulation_fusion": True}, DP2, GPU | {"native_model": True}, "error",
     "grad-fusion-needs-megatron-layers"),
    ({"gradient_accumulation_fusion": True}, DP2,
     GPU | {"te_version": None, "has_fused_wgrad": False}, "error", "grad-fusion-needs-kernel"),
    ({"cuda_graphs": "full_iteration"}, DP2, GPU, "error", "cuda-graphs-full-iteration"),
    ({"cuda_graphs": "local"}, DP2, CPU, "error", "cuda-graphs-need-gpu"),
    ({"cuda_graphs": "local"}, DP2, GPU | {"native_model": True}, "error",
     "cuda-graphs-need-megatron-layers"),
    ({"cuda_graphs": "transformer_engine"}, DP2, GPU | {"engine_version": (0, 18, 2)}, "error",
     "cuda-graphs-need-engine"),
    ({"cuda_graphs": "transformer_engine"}, DP2, GPU | {"te_version": None}, "error",
     "cuda-graphs-need-te"),
    ({"cuda_graphs": "transformer_engine"}, DP2, GPU | {"precision": "16-mixed"}, "error",
     "cuda-graphs-need-bf16"),
    ({"cuda_graphs": "local"}, DP2, GPU | {"dims": ModelDims(num_moe_experts=8)}, "error",
     "cuda-graphs-local-needs-dense-layers"),
    ({"cuda_graphs": "local"}, (2, {"pp": 2}), GPU, "error", "cuda-graphs-local-needs-one-stage"),
    ({"cuda_graphs": "local"}, DP2,
     GPU | {"environment": {"PYTORCH_ALLOC_CONF": "expandable_segments: True"}}, "error",
     "cuda-graphs-exclude-expandable-segments"),
    ({"cp_comm_type": "a2a"}, DP2, GPU, "error", "cp-comm-type-needs-cp"),
    ({"cp_comm_type": "a2a"}, (8, {"tp": 2, "cp": 4}),
     GPU | {"dims": ModelDims(num_attention_heads=32, num_query_groups=4)}, "error",
     "cp-all-to-all-needs-heads"),
    ({"cp_comm_type": "a2a+p2p"}, (4, {"cp": 4}),
     GPU | {"dims": ModelDims(num_attention_heads=5)}, "error", "hierarchical-cp-needs-two-levels"),
    ({"nccl_communicators": {"dp_cp": {"max_ctas": 8}}}, DP2, CPU, "error",
     "nccl-settings-need-gpu"),
    ({"nccl_communicators": {"data": {"max_ctas": 8}}}, DP2, GPU, "error", "nccl-group-unknown"),
    ({"nccl_communicators": {"dp": {"max_cta": 8}}}, DP2, GPU, "error", "nccl-settings-unknown"),
    ({"nccl_communicators": {"dp": {"max_ctas": "8"}}}, DP2, GPU, "error", "nccl-settings-unknown"),
    ({"nccl_communicators": {"dp": {"net_name": "roce"}}}, DP2, GPU, "error",
     "nccl-settings-unknown"),
    ({"nccl_communicators": {"dp": 8}}, DP2, GPU, "error", "nccl-settings-unknown"),
    ({"nccl_communicators": {"pp": {"max_ctas": 4}}, "overlap_p2p": True},
     (2, {"pp": 2, "vpp": 2}), GPU, "warning", "nccl-settings-one-way-at-pp2"),
    ({"high_priority_streams": ["pp"], "batch_p2p": False}, (2, {"pp": 2}), GPU, "warning",
     "nccl-settings-one-way-at-pp2"),
    ({"high_priority_streams": ["data"]}, DP2, GPU, "error", "nccl-group-unknown"),
    ({"high_priority_streams": ["dp_cp"]}, DP2, CPU, "error", "nccl-settings-need-gpu"),
    ({"num_distributed_optimizer_instances": 2}, DP2, CPU | {"has_einops": False}, "error",
     "optimizer-instances-need-einops"),
    ({"num_distributed_optimizer_instances": 2, "overlap_grad_reduce": True}, DP2,
     GPU | {"engine_version": (0, 16, 1)}, "error", "overlap-with-instances-wrong-before-0.17"),
    ({}, (8, {"tp": 4, "ep": 2, "etp": 2}), GPU | {"engine_version": (0, 18, 0)}, "warning",
     "expert-grad-norm-before-0.19"),
    ({}, (2, {"pp": 2}), CPU | {"dims": ModelDims(num_layers=8)}, "info", "vpp-would-overlap"),
    ({}, (128, {}), GPU | {"topology": Topology(nodes=16)}, "info", "pad-buckets"),
    ({"ddp": {"num_buckets": 4}}, DP2, CPU, "error", "num-buckets-ignored"),
    ({"ddp": {"reduce_scatter_with_fp32_accumulation": True}}, DP2, CPU | {"optimizer": "sgd"},
     "error", "fp32-accumulation-conflict"),
    ({"ddp": {"reduce_scatter_with_fp32_accumulation": True}, "average_in_collective": True}, DP2,
     GPU, "error", "fp32-accumulation-conflict"),
    ({"ddp": {"param_name_patterns_for_fp32_local_accumulation": ("router",)}}, DP2, GPU, "error",
     "fp32-local-accumulation-conflict"),
    ({"ddp": {"check_for_nan_in_grad": True}}, DP2, GPU | {"precision": "16-mixed"}, "error",
     "nan-check-excludes-fp16"),
    ({"ddp": {"fp8_param_gather": True}}, DP2, GPU, "error", "fp8-parameters-not-supported"),
    ({"optimizer": {"overlap_param_gather_with_optimizer_step": True}}, VPP, GPU, "error",
     "gather-with-step-not-supported"),
    ({"optimizer": {"use_layer_wise_distributed_optimizer": True}}, DP2, GPU, "error",
     "layer-wise-optimizer-not-supported"),
    ({"optimizer": {"decoupled_lr": 1e-4}}, DP2, CPU, "error", "optimizer-field-ignored"),
    ({"optimizer": {"muon_momentum": 0.9}}, DP2, CPU, "error", "optimizer-field-ignored"),
    ({"optimizer": {"optimizer_cuda_graph": True}}, DP2, GPU, "error", "optimizer-field-ignored"),
    ({"optimizer": {"use_precision_aware_optimizer": True}}, DP2, CPU, "error",
     "precision-aware-optimizer-needs"),
    ({"optimizer": {"use_precision_aware_optimizer": True}, "use_distributed_optimizer": False},
     DP2, GPU, "error", "precision-aware-optimizer-needs"),
    ({"optimizer": {"optimizer_cpu_offload": True}}, DP2, GPU, "error",
     "cpu-offload-needs-precision-aware-optimizer"),
    ({"optimizer": {"optimizer_cpu_offload": True, "use_precision_aware_optimizer": True}}, DP2,
     GPU, "error", "cpu-offload-fraction-missing"),
    ({"optimizer": OFFLOAD}, DP2, GPU | {"precision": "32-true"}, "error",
     "cpu-offload-needs-16-bit-parameters"),
    ({"optimizer": OFFLOAD}, DP2, GPU | {"native_model": True}, "error",
     "cpu-offload-needs-16-bit-parameters"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("request_", "grid", "facts", "severity", "code"), RULES, ids=[row[-1] for row in RULES]
)
def test_rule(
    request_: dict[str, Any],
    grid: tuple[int, dict[str, Any]],
    facts: dict[str, Any],
    severity: str,
    code: str,
) -> None:
    _, findings = _plan(grid, facts, **request_)
    found = [finding for finding in findings if finding.code == code]
    assert found, findings
    assert found[0].severity == severity
    assert found[0].fix
    assert found[0].values
    assert found[0].message.endswith(".")
    # Nothing of the kind without what the row asks for.
    if request_:
        _, others = _plan(grid, facts)
        assert code not in {finding.code for finding in others}


def test_all_errors_are_told_at_once() -> None:
    layout = resolve_layout(ParallelSizes(), 2, 0)
    request = SwitchRequest(overlap_p2p=True, sequence_parallel=True, nccl_ub=True)
    with pytest.raises(ConfigurationError) as error:
        resolve_switches(request, layout, Facts(**CPU))
    text = str(error.value)
    assert text.startswith("3 settings cannot work:\n")
    for code in ("sequence-parallel-needs-tp", "nccl-ub-needs-gpu", "overlap-p2p-needs-pp"):
        assert f"[{code}]" in text


def test_dimensions_and_switches_are_told_together() -> None:
    layout = resolve_layout(ParallelSizes(tp=2, pp=2), 4, 0)
    dims = ModelDims(num_layers=5, num_attention_heads=3)
    findings = validate(SwitchRequest(overlap_p2p=True), layout, Facts(**CPU, dims=dims))
    assert [finding.code for finding in findings if finding.severity == "error"] == [
        "overlap-p2p-needs-vpp",
        "layers-multiple-of-stages",
        "heads-multiple-of-tp",
    ]


def test_settings_are_checked_from_sizes_alone() -> None:
    facts = Facts(**CPU)
    layout, switches, findings = check_settings(ParallelSizes(tp=4), SwitchRequest(), 6, facts)
    assert layout is None
    assert switches is None
    assert [finding.code for finding in findings] == ["world-size-multiple"]
    layout, switches, findings = check_settings(
        ParallelSizes(pp=2), SwitchRequest(overlap_p2p=True), 2, facts
    )
    assert findings[0].code == "overlap-p2p-needs-vpp"
    assert findings[0].fix
    facts = Facts(**CPU, dims=ModelDims(num_layers=8))
    layout, switches, findings = check_settings(
        ParallelSizes(pp=2), SwitchRequest(overlap_p2p=True), 2, facts
    )
    assert layout is not None
    assert layout.vpp == 2
    assert switches is not None
    assert switches.overlap_p2p.effective


def test_findings_are_plain_data() -> None:
    _, findings = _plan(DP2, CPU, cp_comm_type="a2a")
    assert findings[0].as_dict() == {
        "code": "cp-comm-type-needs-cp",
        "severity": "error",
        "relation": "`cp_comm_type` ('a2a') has no effect with `cp` (1)",
        "values": {"cp_comm_type": "a2a", "cp": 1},
        "fix": "use cp=2 or more, or cp_comm_type=None",
        "docs": "docs/switches.md#cp-comm-type-needs-cp",
    }
    raise_errors([finding for finding in findings if finding.severity != "error"])


# ------------------------------------------------------------------------------ presets

OVERLAPS = (
    "tp_comm_overlap",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "align_param_gather",
    "overlap_p2p",
    "overlap_p2p_warmup_flush",
    "defer_embedding_wgrad",
)


@pytest.mark.parametrize("grid", [DP2, VPP, (2, {"pp": 2, "vpp": 2}), (8, {"tp": 2, "pp": 2})])
@pytest.mark.parametrize("facts", [CPU, GPU])
def test_safe_overlaps_nothing(grid: Any, facts: dict[str, Any]) -> None:
    switches, findings = _plan(grid, facts, comm="safe")
    assert not [finding for finding in findings if finding.severity == "error"]
    assert not any(getattr(switches, name).effective for name in OVERLAPS)
    if grid[1].get("vpp"):
        assert switches.batch_p2p.effective == (grid[1]["pp"] > 2)


def test_auto_follows_the_table_and_max_adds_to_it() -> None:
    auto, _ = _plan(VPP, GPU)
    on = {name for name in OVERLAPS if getattr(auto, name).effective}
    assert on == {
        "overlap_grad_reduce", "overlap_param_gather", "align_param_gather", "overlap_p2p"
    }  # fmt: skip
    assert {getattr(auto, name).evidence for name in on} == {"recipe"}
    most, _ = _plan(VPP, GPU, comm="max")
    more = {name for name in OVERLAPS if getattr(most, name).effective}
    assert more == on | {"overlap_p2p_warmup_flush", "defer_embedding_wgrad"}


@pytest.mark.parametrize("at", [VPP, (2, {"pp": 2})])
def test_settings_of_the_pipelines_group_govern_all_of_its_transfers_but_between_two(at) -> None:
    """Four stages, or two whose transfers are batched."""
    _, findings = _plan(at, GPU, nccl_communicators={"pp": {"max_ctas": 4}})
    assert all(finding.severity == "info" for finding in findings), findings


def test_candidates_are_off_and_named() -> None:
    switches, findings = _plan(VPP, GPU)
    assert not switches.overlap_p2p_warmup_flush.effective
    named = [finding for finding in findings if finding.code == "candidate"]
    assert {name for finding in named for name in finding.values} == {
        "nccl_ub", "overlap_p2p_warmup_flush", "defer_embedding_wgrad", "cuda_graphs"
    }  # fmt: skip
    assert all(finding.severity == "info" for finding in named)


@pytest.mark.parametrize(
    ("facts", "asked", "effective", "evidence"),
    [
        (GPU, "auto", True, "recipe"),
        (GPU | {"has_fused_wgrad": False}, "auto", False, "candidate"),
        (GPU | {"has_fused_wgrad": False, "te_version": None}, "auto", False, "assert"),
        (GPU | {"native_model": True}, "auto", False, "assert"),
        (CPU, "auto", False, "assert"),
        (GPU | {"has_fused_wgrad": False}, True, True, ""),
        (GPU, False, False, ""),
    ],
)
def test_gradients_are_accumulated_in_the_product_where_apex_is(
    facts: Any, asked: Any, effective: bool, evidence: str
) -> None:
    switch = _plan(DP2, facts, gradient_accumulation_fusion=asked)[0].gradient_accumulation_fusion
    assert (switch.effective, switch.evidence) == (effective, evidence)
    stands_in = "stands in for Apex" in switch.reason
    assert stands_in == (asked is True and not facts.get("has_fused_wgrad"))


@pytest.mark.parametrize("comm", ["safe", "auto", "max"])
@pytest.mark.parametrize("facts", [CPU, GPU, GPU | {"precision": "32-true"}])
def test_graphs_are_never_chosen_for_the_user(facts: Any, comm: Any) -> None:
    switches, findings = _plan(DP2, facts, comm=comm)
    assert switches.cuda_graphs.effective is False
    named = {name for f in findings if f.code == "candidate" for name in f.values}
    assert ("cuda_graphs" in named) == (facts is GPU)


@pytest.mark.parametrize("environment", [
    {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"},
    {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "NCCL_GRAPH_REGISTER": "0"},
])  # fmt: skip
@pytest.mark.parametrize("kind", ["local", "transformer_engine"])
def test_graphs_that_were_asked_for(kind: Any, environment: Any) -> None:
    switches, findings = _plan(DP2, GPU | {"environment": environment}, cuda_graphs=kind)
    assert switches.cuda_graphs.effective == kind
    assert not [finding for finding in findings if finding.severity == "error"]
    layout = resolve_layout(ParallelSizes(), 2, 0)
    fields = model_fields(layout, switches, {}, torch.device("cuda"))
    assert fields["cuda_graph_impl"] == kind
    off, _ = _plan(DP2, GPU, cuda_graphs=False)
    assert "cuda_graph_impl" not in model_fields(layout, off, {}, torch.device("cuda"))


def test_graphs_of_layers_exclude_taking_layers_apart() -> None:
    for kind, overlap, refused in (
        ("local", "1f1b", True),
        ("transformer_engine", "1f1b", True),
        ("transformer_engine", False, False),
        (False, "1f1b", False),
    ):
        found = Findings()
        graphs = _plan(DP2, GPU, cuda_graphs=kind)[0].cuda_graphs
        check_graphs_with_experts(graphs, overlap, found)
        codes = [finding.code for finding in found.sorted()]
        assert codes == (["cuda-graphs-exclude-1f1b-overlap"] if refused else [])


@pytest.mark.parametrize("value", [True, 1, 0, "layers", None])
def test_graphs_are_named_by_kind(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"`cuda_graphs` \(.*\) must .*; use cuda_graphs="):
        SwitchRequest(cuda_graphs=value)


def test_single_switches_override_a_preset() -> None:
    safe, _ = _plan(VPP, CPU, comm="safe", overlap_p2p=True)
    assert safe.overlap_p2p.effective
    assert not safe.overlap_grad_reduce.effective
    most, _ = _plan(VPP, CPU, comm="max", overlap_p2p_warmup_flush=False)
    assert not most.overlap_p2p_warmup_flush.effective
    assert most.overlap_p2p.effective
    needed, _ = _plan(VPP, CPU, comm="safe", overlap_param_gather=True)
    assert needed.overlap_grad_reduce.effective


@pytest.mark.parametrize(
    ("sizes", "world", "dims", "topology", "kind", "levels"),
    [
        ({"cp": 4}, 4, {}, None, "p2p", None),
        ({"cp": 4}, 8, {"num_attention_heads": 8}, Topology(), "p2p", None),
        ({"tp": 4, "cp": 4}, 32, {"num_attention_heads": 32, "num_query_groups": 8},
         Topology(nodes=4), "a2a+p2p", (2, 2)),
        ({"tp": 8, "cp": 4}, 32, {"num_attention_heads": 32}, Topology(nodes=4), "p2p", None),
    ],
)  # fmt: skip
def test_context_parallel_exchange_follows_the_topology(
    sizes: Any, world: int, dims: Any, topology: Any, kind: str, levels: Any
) -> None:
    facts = GPU | {"dims": ModelDims(**dims), "topology": topology}
    switches, _ = _plan((world, sizes), facts)
    assert switches.cp_comm_type.effective == kind
    assert switches.hierarchical_context_parallel_sizes.effective == levels


# ------------------------------------------------------------------------------ into the engine


def test_every_switch_reaches_the_engine() -> None:
    """A switch that no field of the engine carries would be a lie."""
    layout = resolve_layout(ParallelSizes(pp=4, vpp=2), 8, 0)
    request = SwitchRequest(
        comm="max",
        num_distributed_optimizer_instances=2,
        average_in_collective=True,
        nccl_ub=True,
        microbatch_group_size_per_vp_stage=6,
        bucket_size=5000,
        high_priority_streams=("dp_cp",),
        nccl_communicators={"dp_cp": {"max_ctas": 8}},
    )
    switches = resolve_switches(request, layout, Facts(**GPU))
    model = model_fields(layout, switches, {}, torch.device("cuda"))
    assert model["overlap_p2p_comm"] is True
    assert model["batch_p2p_comm"] is False
    assert model["overlap_p2p_comm_warmup_flush"] is True
    assert model["microbatch_group_size_per_vp_stage"] == 6
    assert model["defer_embedding_wgrad_compute"] is True
    assert model["gradient_accumulation_fusion"] is True
    ddp = ddp_fields(switches, {})
    config = engine.ddp_config({**ddp, "nccl_ub": False})
    assert config.overlap_grad_reduce
    assert config.overlap_param_gather
    assert config.align_param_gather
    assert config.use_distributed_optimizer
    assert config.num_distributed_optimizer_instances == 2
    assert config.bucket_size == 5000
    assert config.grad_reduce_in_fp32
    assert config.average_in_collective
    assert ddp["nccl_ub"] is True
    groups = group_fields(switches)
    assert groups["high_priority_stream_groups"] == ["dp_cp"]
    accepted = inspect.signature(parallel_state.initialize_model_parallel).parameters
    assert set(groups) | {"nccl_communicator_config_path"} <= set(accepted)


def test_the_engine_knows_the_names_of_groups() -> None:
    source = inspect.getsource(parallel_state)
    known = set(re.findall(r"""get_nccl_options\(\s*["'](\w+)["']""", source))
    assert set(GROUP_NAMES) <= known
    missing = {name for name in known if "gtp_remat" not in name} - set(GROUP_NAMES)
    assert not missing


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sequence_parallel": True}, "sequence parallelism without tensor parallelism"),
        ({"overlap_p2p_comm_warmup_flush": True}, "warmup and flush"),
        ({"defer_embedding_wgrad_compute": True}, "pipeline model parallel is not used"),
        ({"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32,
          "defer_embedding_wgrad_compute": True}, "gradient accumulation fusion is not used"),
    ],
)  # fmt: skip
def test_what_the_engine_itself_refuses(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TransformerConfig(num_layers=4, hidden_size=8, num_attention_heads=2, **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"tp_comm_overlap": True},
        {"context_parallel_size": 2, "cp_comm_type": "ulysses"},
        {"context_parallel_size": 2, "cp_comm_type": "a2a+p2p"},
        {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32,
         "virtual_pipeline_model_parallel_size": 2, "overlap_p2p_comm": True,
         "batch_p2p_comm": True},
    ],
)  # fmt: skip
def test_what_the_engine_accepts_without_a_word(fields: dict[str, Any]) -> None:
    """If one of these raises, the engine has begun to check what the validator checks for it."""
    TransformerConfig(num_layers=4, hidden_size=8, num_attention_heads=2, **fields)


def test_the_engine_ignores_a_number_of_buckets() -> None:
    if not hasattr(DistributedDataParallelConfig, "num_buckets"):
        with pytest.raises(ConfigurationError, match="num_buckets"):
            engine.check_field_names(ddp=["num_buckets"])
        return
    source = inspect.getsource(inspect.getmodule(engine.DistributedDataParallel))
    assert "num_buckets" not in source


def test_bf16_parameters_take_no_fp32_gradient() -> None:
    """What the engine's optimizer without main parameters would do (FP32Optimizer)."""
    param = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match=r"different type|dtype"):
        param.grad = torch.zeros(2)


# ------------------------------------------------------------------------------ documentation


def _codes() -> set[str]:
    """Codes in the source, but for those put together from a prefix."""
    text = "".join(
        path.read_text()
        for folder in ("switches", ".")
        for path in (ROOT / "src" / "lightning_mcore" / folder).glob("*.py")
        if folder == "switches" or path.name == "layout.py"
    )
    plain = set(re.findall(r'"([a-z0-9.]+(?:-[a-z0-9.]+)+)",\n', text))
    prefixes = {"needs", "excludes"}
    return {code for code in plain if code.split("-")[0] not in prefixes} | {"candidate"}


def test_every_code_is_documented() -> None:
    page = (ROOT / "docs" / "switches.md").read_text()
    codes = _codes() | {row[-1] for row in RULES}
    assert len(codes) > 50
    missing = {code for code in codes if f'id="{code}"' not in page}
    assert not missing, sorted(missing)
    documented = set(re.findall(r'id="([a-z0-9.-]+)"', page))
    assert len(documented) >= len(codes)


def test_every_argument_has_a_section() -> None:
    page = (ROOT / "docs" / "switches.md").read_text()
    for name in SwitchRequest.__dataclass_fields__:
        if name not in ("micro_batch_size", "ddp", "optimizer"):
            assert f"`{name}`" in page, name
