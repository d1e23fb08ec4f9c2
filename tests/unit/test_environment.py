"""Which variables a run wants and what is wrong with those that are set: a table of rules."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_mcore import MCoreStrategy, topology_probe
from lightning_mcore.config import ParallelSizes, SwitchRequest
from lightning_mcore.environment import (
    CONNECTIONS,
    Uses,
    environment_text,
    in_words,
    plan_environment,
    shown,
)
from lightning_mcore.environment.uses import uses_of
from lightning_mcore.errors import ConfigurationError
from lightning_mcore.experts import ExpertRequest, choose_experts
from lightning_mcore.layout import resolve_layout
from lightning_mcore.switches import Facts, resolve_switches
from lightning_mcore.topology import Topology
from lightning_mcore.topology_probe import Hardware, read_hardware
from tests.unit.nvml import FakeNvml

DOCS = Path(__file__).parents[2] / "docs" / "environment.md"

HOPPER = Uses(arch="hopper", nodes=2, world_size=16, torch_version=(2, 11))
TP = replace(HOPPER, splits_layers=True)
DP = replace(HOPPER, overlaps_data_parallel=True)
EXPERTS = replace(HOPPER, overlaps_experts=True, dispatcher="alltoall")
BLACKWELL = replace(TP, arch="blackwell")


def codes(uses, environ, *severities):
    found = plan_environment(uses, environ).findings
    return [f.code for f in found if not severities or f.severity in severities]


@pytest.mark.parametrize(
    ("uses", "wanted"),
    [
        (HOPPER, None),
        (TP, "1"),
        (replace(TP, arch="ampere"), "1"),
        (DP, None),
        (EXPERTS, "32"),
        (replace(EXPERTS, splits_layers=True), "32"),
        (replace(HOPPER, dispatcher="alltoall"), None),
        (replace(HOPPER, dispatcher="deepep"), "32"),
        (replace(TP, dispatcher="deepep"), "1"),
        (BLACKWELL, "32"),
        (replace(BLACKWELL, world_size=1, nodes=1), None),
        (replace(TP, arch="cpu"), None),
        (replace(TP, arch="unknown"), None),
        (replace(EXPERTS, arch="unknown"), "32"),
    ],
)
def test_the_number_of_connections(uses, wanted):
    plan = plan_environment(uses, {})
    assert plan.to_set == ({CONNECTIONS: wanted} if wanted else {})
    assert not [f for f in plan.findings if f.severity != "info"], "nothing is set, nothing wrong"
    if wanted:
        mine = plan_environment(uses, {CONNECTIONS: "7"})
        assert mine.to_set == {}, "a value of the user's own wins"
        assert mine.variable(CONNECTIONS).current == "7"


@pytest.mark.parametrize(
    ("uses", "value", "found"),
    [
        (TP, "1", []),
        (TP, "8", [("env-connections-tp", "warning")]),
        (replace(TP, arch="ampere"), "8", [("env-connections-tp", "warning")]),
        (BLACKWELL, "8", []),
        (BLACKWELL, "1", []),
        (DP, "1", [("env-connections-dp", "warning")]),
        (replace(DP, splits_layers=True), "1", [("env-connections-dp", "info")]),
        (replace(DP, arch="blackwell"), "1", []),
        (replace(DP, arch="unknown"), "1", []),
        (DP, "8", []),
        (HOPPER, "1", []),
        (EXPERTS, "1", [("env-connections-experts", "warning")]),
        (EXPERTS, "32", []),
        (replace(EXPERTS, splits_layers=True), "32", [("env-connections-both", "info")]),
        (HOPPER, "0", [("env-connections-range", "warning")]),
        (TP, "33", [("env-connections-range", "warning")]),
        (TP, "one", [("env-connections-range", "warning")]),
        (TP, "", [("env-connections-range", "warning")]),
    ],
)
def test_a_number_of_connections_that_is_set(uses, value, found):
    findings = plan_environment(uses, {CONNECTIONS: value}).findings
    assert [(f.code, f.severity) for f in findings] == found
    for finding in findings:
        assert value in finding.relation or finding.code == "env-connections-both"
        assert finding.values == {CONNECTIONS: value}


def test_multicast_that_is_off_reaches_whoever_would_create_it():
    off = {"NCCL_NVLS_ENABLE": "0"}
    assert plan_environment(HOPPER, off).to_set == {"UB_SKIPMC": "1"}
    assert plan_environment(HOPPER, {}).to_set == {}
    assert plan_environment(HOPPER, {"NCCL_NVLS_ENABLE": "2"}).to_set == {}
    deepep = replace(HOPPER, dispatcher="deepep")
    assert plan_environment(deepep, off).to_set == {
        CONNECTIONS: "32",
        "UB_SKIPMC": "1",
        "NVSHMEM_DISABLE_NVLS": "1",
    }
    assert sorted(plan_environment(deepep, off).to_set_in_ranks) == [
        "NVSHMEM_DISABLE_NVLS",
        "UB_SKIPMC",
    ], "CUDA may have started in a rank"
    stated = replace(HOPPER, multicast=False)
    assert plan_environment(stated, {}).to_set == {"NCCL_NVLS_ENABLE": "0", "UB_SKIPMC": "1"}


@pytest.mark.parametrize(
    ("change", "environ", "code"),
    [
        ({"nccl_ub": True}, {"NCCL_NVLS_ENABLE": "0"}, "env-multicast-nccl-ub"),
        ({"nccl_ub": True, "multicast": False}, {}, "env-multicast-nccl-ub"),
        (
            {"userbuffers": True},
            {"NCCL_NVLS_ENABLE": "0", "UB_SKIPMC": "0"},
            "env-multicast-userbuffers",
        ),
        (
            {"nccl_ub": True, "torch_version": (2, 10)},
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64, expandable_segments: True"},
            "env-nccl-ub-segments",
        ),
    ],
)
def test_multicast_and_registered_buffers(change, environ, code):
    assert codes(replace(HOPPER, **change), environ, "error") == [code]
    assert codes(HOPPER, environ, "error") == [], "only for runs that use it"


def test_expandable_segments_are_fine_with_new_torch():
    uses = replace(HOPPER, nccl_ub=True, torch_version=(2, 11))
    assert codes(uses, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, "error") == []


TE = replace(HOPPER, has_te=True)
ONE_NODE = replace(HOPPER, nodes=1, world_size=8)


@pytest.mark.parametrize(
    ("uses", "name", "bad", "good", "code", "severity"),
    [
        (HOPPER, "NCCL_P2P_DISABLE", "1", "0", "env-nccl-slow-path", "warning"),
        (HOPPER, "NCCL_SHM_DISABLE", "1", "0", "env-nccl-slow-path", "warning"),
        (HOPPER, "NCCL_IB_DISABLE", "1", "0", "env-nccl-slow-path", "warning"),
        (HOPPER, "NCCL_SOCKET_IFNAME", "lo", "eth0", "env-nccl-loopback", "error"),
        (HOPPER, "NCCL_SOCKET_IFNAME", "=lo", "^lo", "env-nccl-loopback", "error"),
        (HOPPER, "NCCL_ALGO", "Ring", "", "env-nccl-forced", "warning"),
        (HOPPER, "NCCL_PROTO", "LL", "", "env-nccl-forced", "warning"),
        (HOPPER, "NCCL_DEBUG", "info", "WARN", "env-nccl-debug", "info"),
        (HOPPER, "NCCL_COLLNET_ENABLE", "1", None, "env-no-effect", "warning"),
        (HOPPER, "CUDA_LAUNCH_BLOCKING", "1", "0", "env-serialises", "warning"),
        (HOPPER, "TORCH_NCCL_BLOCKING_WAIT", "1", "0", "env-serialises", "warning"),
        (HOPPER, "TORCH_NCCL_NAN_CHECK", "1", "0", "env-serialises", "warning"),
        (HOPPER, "TORCH_DISTRIBUTED_DEBUG", "DETAIL", "INFO", "env-serialises", "warning"),
        (HOPPER, "TORCH_NCCL_AVOID_RECORD_STREAMS", "1", None, "env-no-effect", "info"),
        (HOPPER, "NCCL_ASYNC_ERROR_HANDLING", "1", None, "env-old-name", "info"),
        (HOPPER, "NCCL_DESYNC_DEBUG", "1", None, "env-old-name", "info"),
        (TE, "NVTE_FLASH_ATTN", "0", "1", "env-attention", "warning"),
        (TE, "NVTE_FUSED_ATTN", "0", "1", "env-attention", "warning"),
    ],
)
def test_single_variables(uses, name, bad, good, code, severity):
    (finding,) = plan_environment(uses, {name: bad}).findings
    assert (finding.code, finding.severity) == (code, severity)
    assert finding.relation.startswith(f"`{name}` ({bad}) ")
    assert finding.values == {name: bad}
    if good is not None:
        assert codes(uses, {name: good}) == []
    assert codes(replace(uses, arch="cpu"), {name: bad}) == [], "no rule is about a CPU run"


def test_rules_that_are_about_several_nodes_or_te():
    assert codes(ONE_NODE, {"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}) == []
    assert codes(replace(ONE_NODE, world_size=1), {"NCCL_P2P_DISABLE": "1"}) == []
    assert codes(HOPPER, {"NVTE_FLASH_ATTN": "0"}) == []
    old = replace(HOPPER, torch_version=(2, 6))
    assert codes(old, {"TORCH_NCCL_AVOID_RECORD_STREAMS": "1"}) == []


def test_what_a_run_may_gain_from():
    overlapping = replace(TE, overlaps_data_parallel=True)
    (finding,) = plan_environment(overlapping, {}).findings
    assert finding.code == "env-norm-margin"
    assert "NVTE_FWD_LAYERNORM_SM_MARGIN=16 NVTE_BWD_LAYERNORM_SM_MARGIN=16" in finding.fix
    half = plan_environment(overlapping, {"NVTE_FWD_LAYERNORM_SM_MARGIN": "8"}).findings[0]
    assert "FWD" not in half.fix
    assert codes(TE, {}) == codes(replace(DP), {}) == []
    assert codes(replace(HOPPER, dispatcher="hybridep"), {}) == ["env-hybridep-domain"]
    deepep = replace(HOPPER, dispatcher="deepep")
    assert codes(deepep, {}) == ["env-deepep-ibgda"]
    assert codes(replace(deepep, nodes=1), {}) == []


def test_errors_come_first():
    environ = {"NCCL_DEBUG": "INFO", "NCCL_ALGO": "Ring", "NCCL_SOCKET_IFNAME": "lo"}
    severities = [f.severity for f in plan_environment(HOPPER, environ).findings]
    assert severities == ["error", "warning", "info"]


def test_which_variables_are_shown():
    environ = {
        "NCCL_DEBUG": "WARN",
        "TORCH_NCCL_HIGH_PRIORITY": "1",
        "NVTE_FLASH_ATTN": "1",
        "UB_SKIPMC": "1",
        CONNECTIONS: "1",
        "AWS_SECRET_ACCESS_KEY": "never printed",
        "PATH": "/bin",
    }
    assert sorted(shown(environ)) == sorted(environ.keys() - {"AWS_SECRET_ACCESS_KEY", "PATH"})


@pytest.mark.parametrize(
    ("uses", "environ", "text"),
    [
        (HOPPER, {}, "CUDA_DEVICE_MAX_CONNECTIONS unset"),
        (TP, {CONNECTIONS: "1"}, "CUDA_DEVICE_MAX_CONNECTIONS 1"),
        (
            replace(HOPPER, dispatcher="deepep"),
            {},
            "CUDA_DEVICE_MAX_CONNECTIONS unset; CUDA_DEVICE_MAX_CONNECTIONS should be 32 from"
            " before the start: deepep runs on streams of its own",
        ),
        (
            DP,
            {CONNECTIONS: "1"},
            "CUDA_DEVICE_MAX_CONNECTIONS 1; `CUDA_DEVICE_MAX_CONNECTIONS` (1) makes the overlap of"
            " data-parallel communication depend on the order of launches, and may hide nothing of"
            " it; unset it",
        ),
        (
            HOPPER,
            {"NCCL_NVLS_ENABLE": "0", "UB_SKIPMC": "1", "NCCL_DEBUG": "INFO"},
            "CUDA_DEVICE_MAX_CONNECTIONS unset; UB_SKIPMC 1",
        ),
    ],
)
def test_the_header_says_what_is_in_effect(uses, environ, text):
    assert in_words(plan_environment(uses, environ), environ) == text


def test_a_stated_topology_wins_over_the_variable():
    stated = plan_environment(replace(HOPPER, multicast=False), {"NCCL_NVLS_ENABLE": "1"})
    assert stated.variable("NCCL_NVLS_ENABLE").current == "1"
    assert stated.to_set == {"UB_SKIPMC": "1"}


def test_the_row_of_the_header():
    layout = resolve_layout(ParallelSizes(tp=2), 8, 0)
    facts = Facts(engine_version=(0, 19, 2), on_gpu=True, precision="bf16-mixed")
    switches = resolve_switches(SwitchRequest(), layout, facts)
    experts, _ = choose_experts(ExpertRequest(), layout, facts)
    unknown = environment_text(layout, switches, experts, facts)
    assert unknown.startswith("CUDA_DEVICE_MAX_CONNECTIONS unset; what it should be depends on")
    known = replace(facts, topology=Topology(arch="hopper"), environment={CONNECTIONS: "1"})
    text = environment_text(layout, switches, experts, known)
    assert text == "CUDA_DEVICE_MAX_CONNECTIONS 1"
    assert "not known" not in text
    assert environment_text(layout, switches, experts, replace(facts, on_gpu=False)) is None


@pytest.mark.parametrize("overlap", ["1f1b", False])
def test_what_experts_ask_of_the_environment(overlap):
    """From the strategy's arguments to the variable: 1F1B needs more than one connection."""
    layout = resolve_layout(ParallelSizes(ep=2), 8, 0)
    topology = Topology(arch="hopper")
    facts = Facts(engine_version=(0, 19, 2), on_gpu=True, precision="bf16-mixed", topology=topology)
    switches = resolve_switches(SwitchRequest(), layout, facts)
    request = ExpertRequest(moe_dispatcher="alltoall", overlap_moe=overlap)
    experts, findings = choose_experts(request, layout, facts)
    assert [found for found in findings if found.severity == "error"] == []
    uses = uses_of(layout, switches, experts, facts)
    assert uses.overlaps_experts is (overlap == "1f1b")
    assert uses.dispatcher == "alltoall"
    wanted = {v.name: v.value for v in plan_environment(uses, {}).wanted}
    assert (wanted.get(CONNECTIONS) == "32") is (overlap == "1f1b")


def test_a_topology_of_the_users_own_is_kept(monkeypatch):
    mine = Topology(arch="hopper", nodes=2, source="the data sheet")
    request = MCoreStrategy(topology=mine)._request
    on = partial(request.on_machines, environ={}, nodes=3, ranks_per_node=4)
    assert on(torch.device("cuda")).topology is mine
    found = replace(request, topology=replace(mine, source="NVML"))
    again = partial(found.on_machines, environ={}, nodes=3, ranks_per_node=4)
    monkeypatch.setattr(
        topology_probe, "read_hardware", lambda environ: read_hardware({}, FakeNvml())
    )
    assert again(torch.device("cuda")).topology.nodes == 3, "found for another run, so read again"
    assert again(torch.device("cpu")) is found


@pytest.fixture
def launching(monkeypatch):
    """A strategy on 8 GPUs that is about to start processes, and what it would set for them."""
    monkeypatch.delenv(CONNECTIONS, raising=False)
    monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)

    def launching(device="cuda", **arguments):
        topology = Topology(arch="hopper", gpus_per_node=8)
        strategy = MCoreStrategy(**{"topology": topology, **arguments})
        strategy.parallel_devices = [torch.device(device, index) for index in range(8)]
        strategy.cluster_environment = LightningEnvironment()
        return strategy._launch_variables()

    return launching


def test_what_lightnings_launcher_is_told(launching, monkeypatch):
    assert launching(tp=8) == {CONNECTIONS: "1"}
    assert launching() == {}
    assert launching(tp=8, topology=Topology(arch="blackwell")) == {CONNECTIONS: "32"}
    assert launching("cpu", tp=8) == {}
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    assert launching() == {"UB_SKIPMC": "1"}
    monkeypatch.setenv(CONNECTIONS, "8")
    assert launching(tp=8) == {"UB_SKIPMC": "1"}


def test_settings_that_cannot_work_start_no_process(launching):
    with pytest.raises(
        ConfigurationError, match=r"`world_size` \(8\) must be a multiple of `tp` \(3"
    ):
        launching(tp=3)


def test_gpus_that_nvml_does_not_tell_about(launching, monkeypatch):
    monkeypatch.setattr(topology_probe, "read_hardware", lambda environ: Hardware(notes=("no",)))
    assert launching(tp=8, topology=None) == {}, "it depends on what is not known"
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    assert launching(tp=8, topology=None) == {"UB_SKIPMC": "1"}
    monkeypatch.delenv("NCCL_NVLS_ENABLE")
    monkeypatch.setattr(
        topology_probe, "read_hardware", lambda environ: read_hardware({}, FakeNvml())
    )
    assert launching(tp=8, topology=None) == {CONNECTIONS: "1"}


def test_every_rule_is_documented():
    source = Path(plan_environment.__code__.co_filename).parent
    text = "".join(path.read_text() for path in source.glob("*.py"))
    found = {word.strip('"') for word in text.replace(",", " ").replace(")", " ").split()}
    rules = {word for word in found if word.startswith("env-")}
    assert len(rules) > 15
    documented = DOCS.read_text()
    assert not [rule for rule in sorted(rules) if f"`{rule}`" not in documented]
