"""What a run does, which variables it wants, and the answer, as frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lightning_mcore.findings import Finding, Findings, Severity
from lightning_mcore.topology import Arch

__all__ = ["CONNECTIONS", "EnvironmentPlan", "Noted", "Uses", "Variable"]

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Hardware queues between host and GPU. CUDA reads it once, when it starts in a process."""

_DOCS = "docs/environment.md#rules"


@dataclass(frozen=True, kw_only=True, slots=True)
class Uses:
    """What a run does that environment variables bear upon."""

    arch: Arch | Literal["unknown"]
    """Generation of the GPUs; ``"cpu"``: no rule applies; ``"unknown"``: those that depend on it
    do not."""
    nodes: int = 1
    """Hosts."""
    world_size: int = 1
    """Ranks."""
    splits_layers: bool = False
    """Whether Megatron layers are cut by tensor or context parallelism."""
    overlaps_data_parallel: bool = False
    """Whether gradients or parameters travel during compute."""
    overlaps_experts: bool = False
    """Whether the experts' all-to-all runs under another microbatch's compute."""
    dispatcher: str = ""
    """How tokens reach experts: ``"alltoall"``, ``"deepep"``, ``"hybridep"``; empty without
    experts or if left to the model."""
    userbuffers: bool = False
    """Whether TransformerEngine overlaps tensor-parallel communication with its GEMMs."""
    nccl_ub: bool = False
    """Whether the engine registers buffers with NCCL, which turns NVLink multicast on."""
    has_te: bool = False
    """Whether TransformerEngine is installed."""
    multicast: bool = True
    """``False`` if NVLink multicast must stay off."""
    torch_version: tuple[int, ...] = ()
    """Release numbers of torch; empty if unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variable:
    """A variable that a run wants."""

    name: str
    """The variable."""
    value: str
    """What it should be."""
    reason: str
    """Why, without a full stop."""
    current: str | None
    """What it is; ``None`` if unset."""

    @property
    def unset(self) -> bool:
        """Whether the user left it to us."""
        return self.current is None


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentPlan:
    """The answer: what should be set, and what is wrong with what is set."""

    wanted: tuple[Variable, ...]
    """Variables with the value that the run wants, set or not."""
    findings: tuple[Finding, ...]
    """Errors first, then warnings and hints."""

    @property
    def to_set(self) -> dict[str, str]:
        """What a launcher should add to the environment of the processes it starts."""
        return {variable.name: variable.value for variable in self.wanted if variable.unset}

    @property
    def to_set_in_ranks(self) -> dict[str, str]:
        """The part of it that still counts in ranks that run already, before NCCL starts."""
        # By the time a rank has found its device, CUDA may have started in it.
        return {name: value for name, value in self.to_set.items() if name != CONNECTIONS}

    def variable(self, name: str) -> Variable | None:
        """The wanted variable of this name."""
        return next((variable for variable in self.wanted if variable.name == name), None)


class Noted:
    """An environment, and what was found wrong in it."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self.all = Findings()

    def note(self, severity: Severity, code: str, relation: str, fix: str, *names: str) -> None:
        """Notes a finding about the variables ``names``."""
        values = {name: self.environ.get(name) for name in names}
        self.all.add(
            Finding(
                code=code, severity=severity, relation=relation, fix=fix, values=values, docs=_DOCS
            )
        )
