"""Settings of expert layers: what is chosen and why, every refusal, plans for other machines."""

from __future__ import annotations

import dataclasses
import sys
import textwrap
import time
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_mcore.config import ParallelSizes, SwitchRequest
from lightning_mcore.errors import ConfigurationError
from lightning_mcore.experts import (
    ExpertFacts,
    ExpertRequest,
    ExpertSwitches,
    FlexPackage,
    check_expert_config,
    plan_experts,
    probe_deep_ep,
    resolve_experts,
    wants_probe,
)
from lightning_mcore.findings import Findings
from lightning_mcore.header import Batch, format_header
from lightning_mcore.layout import resolve_layout
from lightning_mcore.switches import Facts, resolve_switches
from lightning_mcore.topology import Topology

H100 = Topology(gpus_per_nvlink_domain=8, nodes=8, gpus_per_node=8, arch="hopper")
ONE_NODE = Topology(gpus_per_nvlink_domain=8, nodes=1, gpus_per_node=8, arch="hopper")
NVL72 = Topology(gpus_per_nvlink_domain=64, nodes=16, gpus_per_node=4, arch="blackwell")
"""64 GPUs of a rack, as jobs take them."""
USABLE = FlexPackage(version="1.2.1", has_hybridep=True, has_nvshmem=True)
MISSING = FlexPackage(problem="ModuleNotFoundError: No module named 'deep_ep'")
GPU = ExpertFacts(
    engine_version=(0, 19, 2),
    on_gpu=True,
    precision="bf16-mixed",
    topology=H100,
    package=USABLE,
)
CPU = dataclasses.replace(
    GPU, on_gpu=False, topology=Topology(arch="cpu"), package=None, precision="32-true"
)


def resolve(
    facts: ExpertFacts = GPU, *, world: int | None = None, sizes: Any = None, **request: Any
) -> tuple[ExpertSwitches, list[Any]]:
    sizes = ParallelSizes(**(sizes or {"ep": 16}))
    topology = facts.topology or Topology()
    layout = resolve_layout(sizes, world or topology.num_gpus, 0)
    findings = Findings()
    return resolve_experts(ExpertRequest(**request), layout, facts, findings), findings.sorted()


# ------------------------------------------------------------------------- what auto chooses

AUTO = [
    ("inside a node", GPU, {"ep": 8}, "alltoall", "inside the NVLink domain"),
    ("across nodes", GPU, {"ep": 16}, "deepep", "deep_ep 1.2.1 can be used"),
    ("not installed", dataclasses.replace(GPU, package=MISSING), {"ep": 16}, "alltoall",
     "No module named"),
    ("nobody looked", dataclasses.replace(GPU, package=None), {"ep": 16}, "alltoall",
     "nobody looked"),
    ("no NVSHMEM", dataclasses.replace(GPU, package=FlexPackage(version="1.2.1")), {"ep": 16},
     "alltoall", "without it"),
    ("fp32", dataclasses.replace(GPU, precision="32-true"), {"ep": 16}, "alltoall", "sends bf16"),
    ("B200 nodes", dataclasses.replace(GPU, topology=dataclasses.replace(H100, arch="blackwell")),
     {"ep": 16}, "alltoall", "on Hopper only"),
    ("rack", dataclasses.replace(GPU, topology=NVL72), {"ep": 32}, "hybridep", "can be used"),
    ("rack, old package", dataclasses.replace(
        GPU, topology=NVL72, package=FlexPackage(version="1.2.1", has_nvshmem=True)),
     {"ep": 32}, "alltoall", "HybridEPBuffer"),
    ("one node of a rack", dataclasses.replace(GPU, topology=NVL72), {"ep": 4}, "alltoall",
     "inside the NVLink domain"),
    ("unknown machines", dataclasses.replace(GPU, topology=None), {"ep": 8}, "alltoall",
     "not known"),
    ("no ep", GPU, {}, None, "ep = 1"),
    ("CPU", CPU, {"ep": 8}, "alltoall", "on CPU"),
]  # fmt: skip


@pytest.mark.parametrize(("facts", "sizes", "chosen", "why"), [row[1:] for row in AUTO],
                         ids=[row[0] for row in AUTO])  # fmt: skip
def test_auto_chooses_by_topology_and_says_why(facts, sizes, chosen, why):
    switches, findings = resolve(facts, sizes={"ep": 1, **sizes})
    assert switches.moe_dispatcher.effective == chosen
    assert why in switches.moe_dispatcher.reason
    assert not [f for f in findings if f.severity == "error"]
    assert switches.overlap_moe.effective is False


def test_the_package_is_looked_for_only_where_the_choice_needs_it():
    def wants(facts: ExpertFacts, dispatcher: Any, **sizes: int) -> bool:
        layout = resolve_layout(ParallelSizes(**sizes), 64, 0)
        return wants_probe(ExpertRequest(moe_dispatcher=dispatcher), layout, facts)

    assert wants(GPU, "auto", ep=16)
    assert wants(GPU, "deepep", ep=8)
    assert not wants(GPU, "auto", ep=8)
    assert not wants(GPU, "alltoall", ep=16)
    assert not wants(GPU, "auto")
    assert not wants(CPU, "deepep", ep=8)


def test_the_header_shows_what_was_chosen_and_why():
    layout = resolve_layout(ParallelSizes(ep=16), 64, 0)
    facts = Facts(engine_version=(0, 19, 2), on_gpu=True, precision="bf16-mixed")
    text = format_header(
        versions={},
        layout=layout,
        facts=facts,
        switches=resolve_switches(SwitchRequest(), layout, facts),
        batch=Batch(micro_batch_size=1),
        experts=resolve()[0],
    )
    (row,) = [line for line in text.splitlines() if "moe_dispatcher" in line]
    assert row.split()[:3] == ["moe_dispatcher", "deepep", "auto"]
    assert "crosses nodes (2); deep_ep 1.2.1 can be used" in " ".join(text.split())
    assert "overlap_moe" in text


# ------------------------------------------------------------------------- fields of the engine


def test_fields_exist_in_the_installed_engine():
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    te = dataclasses.replace(GPU, te_version=(2, 8))
    every, _ = resolve(te, moe_dispatcher="deepep", overlap_moe="1f1b", delay_wgrad_compute=True)
    shared, _ = resolve(moe_dispatcher="alltoall", overlap_moe="shared_experts")
    assert every.model_fields == {
        "moe_token_dispatcher_type": "flex",
        "moe_flex_dispatcher_backend": "deepep",
        "overlap_moe_expert_parallel_comm": True,
        "delay_wgrad_compute": True,
        "tp_comm_bulk_wgrad": False,
    }
    assert shared.model_fields == {
        "moe_token_dispatcher_type": "alltoall",
        "moe_shared_expert_overlap": True,
    }
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    assert known >= every.model_fields.keys() | shared.model_fields.keys()
    assert every.ddp_fields == {"delay_wgrad_compute": True}
    assert every.ddp_fields.keys() <= {
        field.name for field in dataclasses.fields(DistributedDataParallelConfig)
    }
    assert resolve(sizes={"ep": 1})[0].model_fields == {}


# ------------------------------------------------------------------------- refusals

A100 = dataclasses.replace(H100, arch="ampere")
REFUSED = [
    ("deepep fp32", GPU, {"ep": 16}, {"moe_dispatcher": "deepep"}, {"precision": "32-true"},
     "sends bf16, and `precision` is '32-true'", "precision='bf16-mixed'"),
    ("deepep on CPU", CPU, {"ep": 8}, {"moe_dispatcher": "deepep"}, {"precision": "bf16-mixed"},
     "needs GPUs", "alltoall"),
    ("deepep missing", GPU, {"ep": 8}, {"moe_dispatcher": "deepep"}, {"package": MISSING},
     "No module named", "DeepEP"),
    ("deepep without NVSHMEM", GPU, {"ep": 16}, {"moe_dispatcher": "deepep"},
     {"package": FlexPackage(version="1.2.1")}, "needs NVSHMEM between the 2 nodes", "NVSHMEM_DIR"),
    ("deepep on A100", GPU, {"ep": 8}, {"moe_dispatcher": "deepep"}, {"topology": A100},
     "these are ampere", "alltoall"),
    ("deepep over a rack", GPU, {"ep": 32}, {"moe_dispatcher": "deepep"}, {"topology": NVL72},
     "MNNVL", "hybridep"),
    ("deepep alone", GPU, {"ep": 1}, {"moe_dispatcher": "deepep"}, {}, "needs `ep` (1)", "ep=2"),
    ("hybridep missing", GPU, {"ep": 16}, {"moe_dispatcher": "hybridep"},
     {"package": FlexPackage(version="1.2.1")}, "HybridEPBuffer", "hybrid-ep"),
    ("1f1b fp32", GPU, {"ep": 8}, {"overlap_moe": "1f1b"}, {"precision": "32-true"},
     "needs bf16 or fp16", "bf16-mixed"),
    ("1f1b without vpp", GPU, {"ep": 8, "pp": 2}, {"overlap_moe": "1f1b"}, {}, "needs `vpp`",
     "vpp=2"),
    ("1f1b without ep", GPU, {"ep": 1}, {"overlap_moe": "1f1b"}, {}, "needs `ep` (1)", "ep=2"),
    ("1f1b allgather", GPU, {"ep": 8}, {"overlap_moe": "1f1b", "moe_dispatcher": "allgather"}, {},
     "cannot work with `moe_dispatcher` ('allgather')", "alltoall"),
    ("1f1b one queue", GPU, {"ep": 8}, {"overlap_moe": "1f1b"}, {"max_connections": "1"},
     "CUDA_DEVICE_MAX_CONNECTIONS is 1", "=32"),
    ("1f1b plain modules", GPU, {"ep": 8}, {"overlap_moe": "1f1b"}, {"native_model": True},
     "needs Megatron layers", "overlap_moe=False"),
    ("shared allgather", GPU, {"ep": 8},
     {"overlap_moe": "shared_experts", "moe_dispatcher": "allgather"}, {}, "('allgather')",
     "alltoall"),
    ("shared flex on 0.16", GPU, {"ep": 8},
     {"overlap_moe": "shared_experts", "moe_dispatcher": "deepep"}, {"engine_version": (0, 16, 1)},
     "on megatron-core 0.16.1", "alltoall"),
    ("shared without ep", GPU, {"ep": 1}, {"overlap_moe": "shared_experts"}, {}, "needs `ep` (1)",
     "ep=2"),
    ("delayed alone", GPU, {"ep": 8}, {"delay_wgrad_compute": True}, {"te_version": (2, 8)},
     "needs `overlap_moe`", "1f1b"),
    ("delayed without TE", GPU, {"ep": 8}, {"delay_wgrad_compute": True, "overlap_moe": "1f1b"},
     {}, "is not installed", "[te]"),
    ("delayed old TE", GPU, {"ep": 8}, {"delay_wgrad_compute": True, "overlap_moe": "1f1b"},
     {"te_version": (2, 3)}, "is 2.3", "[te]"),
    ("ep without experts", GPU, {"ep": 8}, {}, {"native_model": True}, "plain torch modules",
     "ep=1"),
    ("etp above tp", GPU, {"ep": 2, "etp": 4, "tp": 2}, {}, {"engine_version": (0, 16, 1)},
     "`etp` (4) above `tp` (2)", "etp=2"),
]  # fmt: skip


@pytest.mark.parametrize(("base", "sizes", "request_", "change", "relation", "fix"),
                         [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])  # fmt: skip
def test_what_cannot_work_is_an_error_with_a_way_out(base, sizes, request_, change, relation, fix):
    facts = dataclasses.replace(base, **change)
    _, findings = resolve(facts, sizes=sizes, **request_)
    errors = [finding for finding in findings if finding.severity == "error"]
    assert [e for e in errors if relation in e.relation and fix in e.fix], errors


@pytest.mark.parametrize(("base", "sizes", "request_", "change"),
                         [(row[1], row[2], row[3], row[4]) for row in REFUSED])  # fmt: skip
def test_without_the_cause_there_is_no_error(base, sizes, request_, change):
    """The same requests where they can work: no rule refuses more than it must."""
    sizes = {**sizes, "ep": max(sizes["ep"], 8)}
    if "pp" in sizes:
        sizes["vpp"] = 2
    if request_.get("moe_dispatcher") == "deepep" and change.get("topology") is NVL72:
        sizes["ep"] = 4
    if request_.get("moe_dispatcher") == "allgather":
        request_ = {**request_, "moe_dispatcher": "alltoall"}
    if "delay_wgrad_compute" in request_:
        request_ = {**request_, "overlap_moe": "1f1b"}
    facts = dataclasses.replace(GPU, te_version=(2, 8))
    _, findings = resolve(facts, sizes=sizes, **request_)
    assert not [finding for finding in findings if finding.severity == "error"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("moe_dispatcher", "flex"),
        ("moe_dispatcher", None),
        ("overlap_moe", True),
        ("overlap_moe", "2f2b"),
        ("delay_wgrad_compute", "auto"),
    ],
)
def test_unknown_values_are_refused(name, value):
    with pytest.raises(ConfigurationError, match=f"`{name}` .*; use {name}="):
        ExpertRequest(**{name: value})


def test_overlap_is_proposed_where_tokens_cross_nodes():
    assert "measure overlap_moe='1f1b'" in resolve()[0].overlap_moe.reason
    assert "other settings" in resolve(sizes={"ep": 16, "pp": 2})[0].overlap_moe.reason
    assert "little to hide" in resolve(sizes={"ep": 8})[0].overlap_moe.reason


# ------------------------------------------------------------------------- the built model


@pytest.mark.parametrize(
    ("request_", "config", "plans", "said"),
    [
        ({"overlap_moe": "1f1b"}, {}, False, "build_schedule_plan"),
        ({"overlap_moe": "shared_experts"}, {}, True, "moe_shared_expert_intermediate_size"),
        ({"moe_dispatcher": "deepep"}, {"moe_router_dtype": None}, True, "moe_router_dtype='fp32'"),
        ({}, {"sequence_parallel": False}, True, "sequence_parallel=True"),
        ({}, {"moe_grouped_gemm": True}, True, "moe_grouped_gemm=False"),
        ({}, {"moe_shared_expert_overlap": True}, True, "overlap_moe='shared_experts'"),
    ],
)
def test_what_only_the_model_shows(request_, config, plans, said):
    right = {
        "num_moe_experts": 16,
        "sequence_parallel": True,
        "moe_shared_expert_intermediate_size": None,
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": False,
        "moe_shared_expert_overlap": False,
    }
    layout = resolve_layout(ParallelSizes(tp=2, ep=8, etp=1), 64, 0)
    switches = resolve_experts(ExpertRequest(**request_), layout, GPU, Findings())
    with pytest.raises(ConfigurationError) as caught:
        check_expert_config(
            SimpleNamespace(**right | config), layout, switches, plans=plans, in_turn=True
        )
    assert said in str(caught.value)
    right["moe_shared_expert_intermediate_size"] = 64
    check_expert_config(SimpleNamespace(**right), layout, switches, plans=True, in_turn=True)
    dense = SimpleNamespace(**right | {"num_moe_experts": None, "sequence_parallel": False})
    check_expert_config(dense, layout, switches, plans=True, in_turn=True)


# ------------------------------------------------------------------------- the probe


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Writes a package ``deep_ep`` that does as told when it is imported."""

    def write(text: str) -> None:
        folder = tmp_path / "deep_ep"
        folder.mkdir()
        (folder / "__init__.py").write_text(textwrap.dedent(text))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        probe_deep_ep.cache_clear()

    yield write
    probe_deep_ep.cache_clear()


def test_probe_that_hangs_ends_at_its_limit(package):
    package("import time; time.sleep(600)")
    start = time.monotonic()
    found = probe_deep_ep(limit_s=3.0)
    assert time.monotonic() - start < 30
    assert found == FlexPackage(problem="importing it did not end within 3 s")


def test_probe_survives_a_crash(package):
    package("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert probe_deep_ep() == FlexPackage(problem="importing it ended with signal 11")


def test_probe_reads_what_the_package_has(package):
    package(
        """
        class Config:
            def get_rdma_buffer_size_hint(self, hidden_bytes, ranks):
                return hidden_bytes * ranks

        class Buffer:
            @staticmethod
            def get_dispatch_config(ranks):
                return Config()
        """
    )
    found = probe_deep_ep()
    assert found.version is not None
    assert (found.has_nvshmem, found.has_hybridep, found.problem) == (True, False, "")


@pytest.mark.skipif("deep_ep" in sys.modules, reason="the package is installed here")
def test_probe_says_what_is_missing(monkeypatch):
    probe_deep_ep.cache_clear()
    monkeypatch.setenv("PYTHONPATH", "")
    found = probe_deep_ep()
    if found.version is None:
        assert "deep_ep" in found.problem
    probe_deep_ep.cache_clear()


# ------------------------------------------------------------------------- plans

QWEN = {"topk": 8, "hidden_size": 4096}
"""Qwen3-235B-A22B: 128 experts, of which a token takes 8."""


@pytest.mark.parametrize(
    ("topology", "ep", "dispatcher", "reach", "per_rank", "warned"),
    [
        (H100, 8, "alltoall", "nvlink", 16, False),
        (H100, 32, "deepep", "network", 4, False),
        (H100, 64, "deepep", "network", 2, True),
        (NVL72, 8, "hybridep", "nvlink", 16, False),
        (NVL72, 32, "hybridep", "nvlink", 4, False),
        (NVL72, 64, "hybridep", "nvlink", 2, True),
    ],
)
def test_plan_of_a_235b_model(topology, ep, dispatcher, reach, per_rank, warned):
    plan = plan_experts(128, ep, topology, **QWEN)
    assert plan.switches.moe_dispatcher.effective == dispatcher
    assert plan.place.reach == reach
    assert plan.experts_per_rank == per_rank
    assert plan.layout.edp == 64 // ep
    useless = [f for f in plan.findings if f.code == "placement-useless"]
    assert bool(useless) == warned
    assert not [f for f in plan.findings if f.severity == "error"]
    # A token goes to 8 experts, of which 1 in ep is at home; twice there and back, in bf16.
    assert plan.token_copies == pytest.approx(8 * (1 - 1 / ep))
    assert plan.bytes_per_token == pytest.approx(8 * (1 - 1 / ep) * 4096 * 2 * 4)
    for part in (str(per_rank), dispatcher, plan.place.text):
        assert part in plan.text


def test_plan_with_one_expert_on_a_rank_and_without_parallelism():
    alone = plan_experts(64, 64, H100)
    assert "1 expert on a rank" in next(f.relation for f in alone.findings)
    assert alone.bytes_per_token is None
    assert not plan_experts(64, 1, ONE_NODE).findings
    useless = next(f for f in plan_experts(64, 32, H100).findings if f.code == "placement-useless")
    assert "use ep=8 where" in useless.fix


def test_plan_hints_at_a_group_that_fits_an_nvlink_domain():
    crossing = [f for f in plan_experts(128, 16, H100).findings if f.code == "ep-crosses-nodes"]
    assert "use ep=8 if" in crossing[0].fix
    # As many ranks as a domain has, but not in one: each expert is cut inside a node.
    plan = plan_experts(128, 8, H100, tp=8, etp=8)
    assert plan.place.reach == "network"
    assert not [f for f in plan.findings if f.code == "ep-crosses-nodes"]


def test_plan_says_what_is_missing_there():
    plan = plan_experts(
        128, 32, H100, package=MISSING, request=ExpertRequest(moe_dispatcher="deepep")
    )
    assert [f.code for f in plan.findings if f.severity == "error"] == ["deep-ep-missing"]
    assert "No module named" in plan.text


def test_allgather_sends_every_token_to_every_rank():
    plan = plan_experts(128, 8, ONE_NODE, request=ExpertRequest(moe_dispatcher="allgather"), **QWEN)
    assert plan.token_copies == 7


def test_plan_refuses_experts_that_do_not_divide():
    with pytest.raises(ConfigurationError, match=r"`num_moe_experts` \(100\)"):
        plan_experts(100, 8, H100)
