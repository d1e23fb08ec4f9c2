"""The whole space of settings: every combination is refused with a way out, or resolves."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st
from megatron.core.transformer.transformer_config import TransformerConfig

from lightning_mcore import Topology
from lightning_mcore._mcore import engine
from lightning_mcore.config import ModelDims, ParallelSizes, SwitchRequest
from lightning_mcore.engine_fields import ddp_fields, group_fields, model_fields
from lightning_mcore.errors import ConfigurationError
from lightning_mcore.layout import layout_findings, resolve_layout
from lightning_mcore.switches import PRECISIONS, Facts, plan_switches, resolve_switches
from lightning_mcore.switches.communicators import GROUP_NAMES

AUTO = st.sampled_from(["auto"] * 5 + [True, False])
"""Mostly left to us: with a dozen explicit values hardly any combination would run."""
SWITCHES = [
    "sequence_parallel", "tp_comm_overlap", "overlap_grad_reduce", "overlap_param_gather",
    "use_distributed_optimizer", "grad_reduce_in_fp32", "average_in_collective", "nccl_ub",
    "overlap_p2p", "overlap_p2p_warmup_flush", "batch_p2p", "batch_p2p_sync",
    "defer_embedding_wgrad", "gradient_accumulation_fusion",
]  # fmt: skip

REQUESTS = st.fixed_dictionaries(
    {
        "comm": st.sampled_from(["safe", "auto", "max"]),
        "num_distributed_optimizer_instances": st.sampled_from([None, None, 1, 2, 3]),
        "bucket_size": st.sampled_from([None, 1, 4000]),
        "microbatch_group_size_per_vp_stage": st.sampled_from([None] * 6 + [1, 2, 4, 8]),
        "cp_comm_type": st.sampled_from([None] * 8 + ["p2p", "all_gather", "a2a", "a2a+p2p"]),
        "cuda_graphs": st.sampled_from(
            ["auto"] * 8 + [False, "local", "transformer_engine", "full_iteration"]
        ),
        "fsdp": st.sampled_from([None] * 9 + ["optim_grads_params"]),
        "nccl_communicators": st.just({})
        | st.dictionaries(
            st.sampled_from([*GROUP_NAMES, "data"]),
            st.sampled_from([{}, {"max_ctas": 8}, {"net_name": "IB"}, {"ctas": 1}]),
            max_size=2,
        ),
        "high_priority_streams": st.just([])
        | st.lists(st.sampled_from([*GROUP_NAMES, "data"]), max_size=1),
        "ddp": st.sampled_from([{}, {}, {"reduce_scatter_with_fp32_accumulation": True}]),
        **dict.fromkeys(SWITCHES, AUTO),
    }
)
LAYOUTS = st.fixed_dictionaries(
    {
        "tp": st.sampled_from([1, 2, 8]),
        "pp": st.sampled_from([1, 2, 4]),
        "vpp": st.sampled_from([None, 1, 2]),
        "cp": st.sampled_from([1] * 9 + [4]),
        "ep": st.sampled_from([1, 2]),
        "etp": st.sampled_from([None, 1]),
    }
)
TOPOLOGIES = st.sampled_from(
    [
        None,
        Topology(nodes=128, network="infiniband"),
        Topology(gpus_per_nvlink_domain=64, nodes=256, gpus_per_node=4, arch="blackwell"),
        Topology(gpus_per_nvlink_domain=1, nodes=2, multicast=False),
    ]
)
FACTS = st.fixed_dictionaries(
    {
        "engine_version": st.sampled_from([(0, 16, 1), (0, 17, 0), (0, 18, 2), (0, 19, 2)]),
        "on_gpu": st.booleans(),
        "precision": st.sampled_from(PRECISIONS),
        "native_model": st.sampled_from([None, True, False]),
        "optimizer": st.sampled_from([None, "adamw", "sgd", "other"]),
        "has_te_or_apex": st.booleans(),
        "te_version": st.sampled_from([None, (2, 20, 2)]),
        "torch_version": st.sampled_from([(2, 6, 0), (2, 11, 0)]),
        "has_fused_wgrad": st.booleans(),
        "has_einops": st.booleans(),
        "torch_norms_only": st.booleans(),
        "per_token_loss": st.booleans(),
        "dims": st.sampled_from(
            [
                ModelDims(),
                ModelDims(num_layers=16, num_attention_heads=32, num_query_groups=8),
                ModelDims(num_layers=16, num_attention_heads=5, multi_latent_attention=True),
            ]
        ),
        "topology": TOPOLOGIES,
        "environment": st.sampled_from(
            [
                {},
                {"NCCL_NVLS_ENABLE": "0"},
                {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            ]
        ),
    }
)


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(sizes=LAYOUTS, world=st.sampled_from([2, 8, 64]), request_=REQUESTS, facts=FACTS)
def test_refused_with_a_way_out_or_resolved(
    sizes: dict[str, Any], world: int, request_: dict[str, Any], facts: dict[str, Any]
) -> None:
    assume(not (sizes["vpp"] == 2 and sizes["pp"] == 1))
    grid = ParallelSizes(**sizes)
    assume(not layout_findings(grid, world, 0))
    layout = resolve_layout(grid, world, 0)
    request, known = SwitchRequest(**request_), Facts(**facts)
    switches, findings = plan_switches(request, layout, known)
    for finding in findings:
        assert finding.code
        assert finding.relation
        assert not finding.relation.endswith(".")
        assert finding.fix
        assert finding.values
        assert finding.as_dict()
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        with pytest.raises(ConfigurationError) as refused:
            resolve_switches(request, layout, known)
        assert all(finding.message in str(refused.value) for finding in errors)
        event("refused")
        return
    event("runs")
    for name in SWITCHES:
        switch = getattr(switches, name)
        assert switch.requested == request_[name]
        if request_[name] != "auto":
            assert switch.effective is request_[name], name
    asked = request_["cuda_graphs"]
    assert switches.cuda_graphs.effective == (False if asked == "auto" else asked)
    assert asked != "full_iteration"
    for entry in dataclasses.fields(switches):
        switch = getattr(switches, entry.name)
        assert switch.name == entry.name
        assert switch.reason
        assert not switch.reason.endswith(".")
        if switch.evidence == "candidate":
            assert switch.effective in (False, 1)
    _check_engine_takes_it(layout, switches, request, known)


def _check_engine_takes_it(
    layout: Any, switches: Any, request: SwitchRequest, facts: Facts
) -> None:
    """What the engine's own configs assert holds for whatever was let through."""
    device = torch.device("cuda" if facts.on_gpu else "cpu")
    dtypes = {"params_dtype": torch.float32, "pipeline_dtype": torch.float32}
    fields = model_fields(layout, switches, dtypes, device)
    config = TransformerConfig(
        num_layers=layout.num_stages,
        hidden_size=64,
        num_attention_heads=32,
        num_moe_experts=8 if layout.ep > 1 else None,
        add_bias_linear=layout.ep == 1,
        **fields,
    )
    # pipeline_parallel/schedules.py, at the start of a step.
    assert not (config.overlap_p2p_comm and config.batch_p2p_comm)
    if layout.vpp is None:
        assert not config.overlap_p2p_comm
    else:
        assert config.microbatch_group_size_per_vp_stage >= layout.pp
        assert not (layout.pp == 2 and config.batch_p2p_comm)
    ddp = engine.ddp_config({**ddp_fields(switches, request.ddp), "nccl_ub": False})
    assert not (ddp.average_in_collective and facts.per_token_loss)
    if ddp.overlap_param_gather:
        assert ddp.use_distributed_optimizer
        assert ddp.overlap_grad_reduce
    assert ddp.align_param_gather == (ddp.overlap_param_gather and layout.vpp is not None)
    if ddp.num_distributed_optimizer_instances > 1:
        assert ddp.use_distributed_optimizer
        assert layout.dp_cp % ddp.num_distributed_optimizer_instances == 0
        assert facts.engine_version >= (0, 17) or not ddp.overlap_grad_reduce
    if ddp.nccl_ub:
        assert facts.multicast
    assert group_fields(switches)["num_distributed_optimizer_instances"] >= 1


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(sizes=LAYOUTS, world=st.sampled_from([2, 8, 64]), facts=FACTS, comm=REQUESTS)
def test_presets_alone_always_work(
    sizes: dict[str, Any], world: int, facts: dict[str, Any], comm: dict[str, Any]
) -> None:
    """Whatever is left to us is never refused, except what no switch can mend."""
    assume(not (sizes["vpp"] == 2 and sizes["pp"] == 1))
    sizes = {**sizes, "cp": 1}
    grid = ParallelSizes(**sizes)
    assume(not layout_findings(grid, world, 0))
    layout = resolve_layout(grid, world, 0)
    _, findings = plan_switches(SwitchRequest(comm=comm["comm"]), layout, Facts(**facts))
    codes = {finding.code for finding in findings if finding.severity == "error"}
    assert codes <= {"etp-needs-gpu", "topology-too-small"}
