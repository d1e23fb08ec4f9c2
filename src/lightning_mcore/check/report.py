"""Everything that ``lightning-mcore check`` finds, as values, before it is printed.

One process on any machine; no process group, no CUDA context, no model code. What would run is
computed by the functions that the strategy itself calls before it creates process groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from lightning_mcore.batch import plan_training
from lightning_mcore.check.config import RunConfig, read_config
from lightning_mcore.check.installation import Package, probe_packages, versions
from lightning_mcore.check.serial import run_as_dict
from lightning_mcore.environment import (
    EnvironmentPlan,
    Uses,
    plan_environment,
    shown,
    uses_of,
)
from lightning_mcore.errors import ConfigurationError
from lightning_mcore.experts import ExpertPlan, ExpertSwitches, choose_experts, plan_experts
from lightning_mcore.findings import Finding, Findings
from lightning_mcore.layout import Axis, Layout
from lightning_mcore.precision import MCorePrecision
from lightning_mcore.switches import (
    Facts,
    Switches,
    check_graphs_with_experts,
    check_settings,
)
from lightning_mcore.topology import Arch, GroupPlace, Network, Topology, place_groups
from lightning_mcore.topology_probe import (
    FOUND,
    Hardware,
    Launch,
    read_hardware,
    read_launch,
    topology_of,
)
from lightning_mcore.version import installed_version

__all__ = ["SCHEMA", "Machines", "Report", "Run", "make_report"]

SCHEMA = 1
"""Version of the JSON form; grows when a key changes its meaning or goes."""

_DOCS = "docs/check.md#findings"


@dataclass(frozen=True, kw_only=True, slots=True)
class Machines:
    """Machines as stated on the command line; ``None``: from the configuration or this machine."""

    devices: int | None = None
    """Ranks on each node."""
    num_nodes: int | None = None
    """Nodes."""
    gpus_per_nvlink_domain: int | None = None
    """GPUs that reach each other through NVLink."""
    arch: Arch | None = None
    """Generation of the GPUs."""
    network: Network | None = None
    """What joins the nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What the configuration would run."""

    config: RunConfig
    """What was asked."""
    facts: Facts
    """What it was decided on; kind of model and optimizer are not known here."""
    world_size: int
    """Ranks."""
    layout: Layout | None
    """As rank 0 has it; ``None`` if the sizes do not fit the ranks."""
    switches: Switches | None
    """Effective switches; ``None`` if some setting cannot work or cannot be read."""
    groups: Mapping[Axis, GroupPlace]
    """Where the groups of each axis lie."""
    num_microbatches: int | None
    """Microbatches in a batch of ``data.batch_size`` samples; ``None`` if that is not known."""
    expert_switches: ExpertSwitches | None = None
    """Settings of expert layers; ``None`` without a layout."""
    experts: ExpertPlan | None = None
    """Dispatcher and overlap of experts, where ``ep`` is above 1 and their number is known."""

    @property
    def bubble(self) -> float | None:
        """Idle time of a pipeline rank as a share of its compute time, without communication.

        ``(pp - 1) / (vpp * num_microbatches)``: stages that take the same time each.
        """
        if self.layout is None or self.num_microbatches is None:
            return None
        return (self.layout.pp - 1) / ((self.layout.vpp or 1) * self.num_microbatches)


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The whole answer."""

    versions: Mapping[str, str]
    """Python and what every run needs."""
    packages: Sequence[Package]
    """Optional packages."""
    hardware: Hardware
    """GPUs of this machine."""
    launch: Launch
    """What a launcher says about the job around this command."""
    topology: Topology
    """The machines that the plan is for."""
    run: Run | None
    """What would run; ``None`` without a configuration."""
    variables: Mapping[str, str]
    """Environment variables that are set and bear upon communication."""
    environment: EnvironmentPlan
    """Variables that are wanted."""
    findings: Sequence[Finding]
    """Errors first, then warnings and hints."""

    @property
    def exit_code(self) -> int:
        """1 with an error among the findings, else 0."""
        return int(any(finding.severity == "error" for finding in self.findings))

    def as_dict(self) -> dict[str, Any]:
        """Plain types, for JSON; ``docs/check.md`` describes the keys."""
        return {
            "schema": SCHEMA,
            "exit_code": self.exit_code,
            "versions": dict(self.versions),
            "packages": {package.name: asdict(package) for package in self.packages},
            "hardware": asdict(self.hardware),
            "launch": asdict(self.launch),
            "topology": asdict(self.topology),
            "run": None if self.run is None else run_as_dict(self.run),
            "environment": {
                "set": dict(self.variables),
                "wanted": [asdict(variable) for variable in self.environment.wanted],
            },
            "findings": [finding.as_dict() for finding in self.findings],
        }


def make_report(
    config: Mapping[str, Any] | None,
    machines: Machines,
    environ: Mapping[str, str],
    *,
    nvml: Any = None,
    packages: Sequence[Package] | None = None,
) -> Report:
    """Looks at this machine and at a configuration.

    Args:
        config: A LightningCLI configuration as a mapping; ``None`` looks at the machine alone.
        machines: What is stated rather than looked up.
        environ: Environment variables, usually ``os.environ``.
        nvml: Stands in for the module ``pynvml``.
        packages: Outcome of ``probe_packages``, if it has run already.

    Raises:
        ConfigurationError: If the stated machines contradict each other.
        UsageError: If configurations cannot be read at all.
    """
    found = Findings()
    packages = probe_packages() if packages is None else packages
    hardware, launch = read_hardware(environ, nvml), read_launch(environ)
    run = None
    if config is None:
        topology, notes = _topology(None, machines, hardware, launch, environ)
        uses = Uses(
            arch=topology.arch,
            nodes=topology.nodes,
            world_size=topology.num_gpus,
            has_te=_has_te(packages),
            multicast=topology.multicast,
            torch_version=installed_version("torch") or (),
        )
    else:
        asked = read_config(config, found)
        topology, notes = _topology(asked, machines, hardware, launch, environ)
        run = _plan(asked, machines, topology, environ, found)
        uses = None
        if run.layout and run.switches and run.expert_switches:
            uses = uses_of(run.layout, run.switches, run.expert_switches, run.facts)
    environment = EnvironmentPlan(wanted=(), findings=())
    if uses is not None:
        environment = plan_environment(uses, environ)
    for finding in environment.findings:
        found.add(finding)
    for note in notes:
        _note(found, "info", "topology", note, "state the topology if this is not so")
    elsewhere = run is not None and topology.arch != "cpu" and topology.source != FOUND
    if elsewhere and not _has_te(packages):
        _note(
            found,
            "info",
            "packages-here",
            "TransformerEngine is not installed here, and the plan is for machines without it",
            "run this command in the environment of the job for what depends on it, such as"
            " sequence_parallel and tp_comm_overlap",
        )
    for package in packages:
        if package.state == "broken":
            relation = f"{package.name} is installed, but {package.detail}"
            _note(found, "warning", "package-broken", relation, "reinstall or remove it")
    return Report(
        versions=versions(),
        packages=packages,
        hardware=hardware,
        launch=launch,
        topology=topology,
        run=run,
        variables=shown(environ),
        environment=environment,
        findings=found.sorted(),
    )


def _topology(
    asked: RunConfig | None,
    machines: Machines,
    hardware: Hardware,
    launch: Launch,
    environ: Mapping[str, str],
) -> tuple[Topology, tuple[str, ...]]:
    """What is stated on the command line, else in the configuration, else what is found here."""
    devices = machines.devices or (asked.devices if asked else None)
    nodes = machines.num_nodes or (asked.num_nodes if asked else None)
    on_cpu = asked is not None and asked.accelerator == "cpu" and machines.arch is None
    topology, notes = topology_of(
        Hardware(notes=("accelerator: cpu",)) if on_cpu else hardware,
        launch,
        environ,
        nodes=nodes,
        ranks_per_node=devices,
    )
    stated = asked.request.topology if asked else None
    if stated is not None:
        topology, notes = stated, ()
    elif topology.arch == "cpu" and asked is not None and asked.accelerator in ("gpu", "cuda"):
        if machines.arch is None and machines.gpus_per_nvlink_domain is None:
            notes = (
                "there is no GPU here, and accelerator asks for GPUs; nodes of 8 Hopper GPUs with"
                " NVLink are assumed",
            )
        topology = _simulated(topology, devices, "assumed")
    changes: dict[str, Any] = {
        name: value
        for name, value in (
            ("gpus_per_nvlink_domain", machines.gpus_per_nvlink_domain),
            ("arch", machines.arch),
            ("network", machines.network),
        )
        if value is not None
    }
    if changes:
        if topology.arch == "cpu" and changes.get("arch") != "cpu":
            topology = _simulated(topology, devices, "stated")
        topology, notes = replace(topology, **changes, source="stated"), ()
    return topology, notes


def _simulated(topology: Topology, devices: int | None, source: str) -> Topology:
    """GPUs where there are none: 8 to a node and an NVLink domain unless told otherwise."""
    per_node = devices or 8
    return replace(
        topology,
        gpus_per_node=per_node,
        gpus_per_nvlink_domain=min(8, per_node),
        arch="hopper",
        source=source,
    )


def _plan(
    asked: RunConfig,
    machines: Machines,
    topology: Topology,
    environ: Mapping[str, str],
    found: Findings,
) -> Run:
    devices = machines.devices or asked.devices or topology.gpus_per_node
    world_size = devices * (machines.num_nodes or asked.num_nodes)
    on_gpu = topology.arch != "cpu"
    # Lightning turns 16-mixed into bf16-mixed on CPU.
    precision = asked.precision if on_gpu or asked.precision != "16-mixed" else "bf16-mixed"
    device = torch.device("cuda" if on_gpu else "cpu")
    facts = replace(
        asked.request.facts(MCorePrecision(), device),
        precision=precision,
        topology=topology,
        environment=dict(environ),
        dims=asked.dims,
    )
    layout, switches, findings = check_settings(
        asked.request.sizes, asked.request.switches, world_size, facts
    )
    for finding in findings:
        # What follows from an argument that could not be read would only mislead.
        if not any(f"`{name}`" in finding.relation for name in asked.unread):
            found.add(finding)
    if asked.unread:
        switches = None
    expert_switches, experts = None, None
    if layout is not None:
        # A run would refuse the same.
        expert_switches, of_experts = choose_experts(asked.request.experts, layout, facts)
        for finding in of_experts:
            found.add(finding)
        if switches is not None:
            check_graphs_with_experts(
                switches.cuda_graphs, expert_switches.overlap_moe.effective, found
            )
        experts = _plan_experts(asked, layout, facts, topology, found)
    return Run(
        config=asked,
        facts=facts,
        world_size=world_size,
        layout=layout,
        switches=switches,
        groups={} if layout is None else place_groups(layout, topology),
        num_microbatches=None if layout is None else _microbatches(asked, layout, found),
        expert_switches=expert_switches,
        experts=experts,
    )


def _plan_experts(
    asked: RunConfig, layout: Layout, facts: Facts, topology: Topology, found: Findings
) -> ExpertPlan | None:
    """The plan for experts, where they are spread and their number is known."""
    experts = asked.dims.num_moe_experts
    if layout.ep == 1 or not experts or experts % layout.ep:
        return None
    fits = topology.num_gpus == layout.world_size
    plan = plan_experts(
        experts,
        layout.ep,
        topology if fits else replace(topology, nodes=1, gpus_per_node=layout.world_size),
        tp=layout.tp,
        pp=layout.pp,
        vpp=layout.vpp,
        etp=layout.etp,
        hidden_size=asked.dims.hidden_size,
        request=asked.request.experts,
        engine_version=facts.engine_version,
        precision=facts.precision,
    )
    for finding in plan.findings:
        # The plan supposes packages to be there; what they would break here has been found.
        if finding.severity != "error":
            found.add(finding)
    return plan


def _microbatches(asked: RunConfig, layout: Layout, found: Findings) -> int | None:
    if asked.batch_size is None:
        return None
    try:
        run = plan_training(
            torch.empty(asked.batch_size, device="meta"),
            micro_batch_size=asked.request.switches.micro_batch_size,
            pp=layout.pp,
            interleaved=layout.vpp is not None,
        )
    except ConfigurationError as error:
        relation, _, fix = str(error).removesuffix(".").partition("; ")
        _note(found, "error", "batch", relation, fix)
        return None
    return len(run.microbatches)


def _note(found: Findings, severity: Any, code: str, relation: str, fix: str) -> None:
    found.add(Finding(code=code, severity=severity, relation=relation, fix=fix, docs=_DOCS))


def _has_te(packages: Sequence[Package]) -> bool:
    return any(p.name == "TransformerEngine" and p.state == "works" for p in packages)
