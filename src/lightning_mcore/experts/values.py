"""What the settings of expert layers are decided on, and what becomes of them: plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from lightning_mcore.errors import ConfigurationError
from lightning_mcore.layout import Layout
from lightning_mcore.switches import Switch
from lightning_mcore.topology import GroupPlace, Topology, place_groups

__all__ = [
    "Dispatcher",
    "ExpertFacts",
    "ExpertRequest",
    "ExpertSwitches",
    "FlexPackage",
    "MoEDispatcher",
    "Obstacle",
    "OverlapMoE",
    "is_rack",
    "is_spread",
    "place_of",
    "version_text",
]

Dispatcher: TypeAlias = Literal["allgather", "alltoall", "deepep", "hybridep"]
"""What moves tokens to the ranks of their experts and back."""

MoEDispatcher: TypeAlias = Dispatcher | Literal["auto"]
"""The strategy's ``moe_dispatcher``."""

OverlapMoE: TypeAlias = bool | Literal["1f1b", "shared_experts", "auto"]
"""The strategy's ``overlap_moe``. ``True`` is refused: there are two ways to overlap."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertRequest:
    """Settings of expert layers as the user gave them.

    Raises:
        ConfigurationError: If a value is not one of the known ones.
    """

    moe_dispatcher: MoEDispatcher = "auto"
    """What moves tokens: see ``docs/moe.md``. ``"auto"`` goes by where the expert-parallel groups
    lie and what is installed; every other value is obeyed or refused."""
    overlap_moe: OverlapMoE = "auto"
    """``"1f1b"`` runs the layers of one microbatch between those of another, so that tokens travel
    during compute; ``"shared_experts"`` computes shared experts meanwhile. ``"auto"`` leaves it
    off and says where it is worth measuring."""
    delay_wgrad_compute: bool = False
    """Computes weight gradients apart from the backward pass, to fill what ``"1f1b"`` leaves."""

    def __post_init__(self) -> None:
        known = (*get_args(Dispatcher), "auto")
        if self.moe_dispatcher not in known:
            raise ConfigurationError(
                f"`moe_dispatcher` ({self.moe_dispatcher!r}) must be one of"
                f" {', '.join(known)}; use moe_dispatcher='auto' to let the topology choose."
            )
        if self.overlap_moe is not False and self.overlap_moe not in (
            "1f1b",
            "shared_experts",
            "auto",
        ):
            raise ConfigurationError(
                f"`overlap_moe` ({self.overlap_moe!r}) must be '1f1b', 'shared_experts', False or"
                " 'auto'; use overlap_moe='1f1b' to send tokens during the compute of another"
                " microbatch."
            )
        if not isinstance(self.delay_wgrad_compute, bool):
            raise ConfigurationError(
                f"`delay_wgrad_compute` ({self.delay_wgrad_compute!r}) must be True or False; use"
                " delay_wgrad_compute=False."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class FlexPackage:
    """What a probe found of the package ``deep_ep``, which has both DeepEP and HybridEP."""

    version: str | None = None
    """Its version; ``None`` if it cannot be used."""
    problem: str = ""
    """Why it cannot be used, without a full stop."""
    has_hybridep: bool = False
    """Whether it has ``HybridEPBuffer``."""
    has_nvshmem: bool = False
    """Whether it was built with NVSHMEM, which transfers between nodes need."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertFacts:
    """What is known about installation, hardware and model."""

    engine_version: tuple[int, ...]
    """Release numbers of megatron-core."""
    on_gpu: bool
    """Whether parameters live on CUDA devices."""
    precision: str
    """``Trainer(precision=...)``."""
    native_model: bool | None = None
    """``True`` for plain torch modules, ``None`` if unknown yet."""
    te_version: tuple[int, ...] | None = None
    """Release numbers of TransformerEngine; ``None`` without it."""
    topology: Topology | None = None
    """The machines; ``None`` if unknown."""
    package: FlexPackage | None = None
    """What the probe found; ``None`` if nobody probed."""
    max_connections: str | None = None
    """``CUDA_DEVICE_MAX_CONNECTIONS``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertSwitches:
    """Effective settings of expert layers. Made by ``resolve_experts``."""

    moe_dispatcher: Switch[str | None]
    """Dispatcher; ``None`` leaves it to the model's own config, as without expert parallelism."""
    overlap_moe: Switch[str | bool]
    """``"1f1b"``, ``"shared_experts"`` or ``False``."""
    delay_wgrad_compute: Switch[bool]
    """Weight gradients apart from the backward pass."""

    @property
    def model_fields(self) -> dict[str, object]:
        """Fields of the engine's TransformerConfig; the same names on 0.16.1 and 0.19.2."""
        fields: dict[str, object] = {}
        dispatcher = self.moe_dispatcher.effective
        if dispatcher in ("deepep", "hybridep"):
            fields["moe_token_dispatcher_type"] = "flex"
            fields["moe_flex_dispatcher_backend"] = dispatcher
        elif dispatcher is not None:
            fields["moe_token_dispatcher_type"] = dispatcher
        if self.overlap_moe.effective == "1f1b":
            fields["overlap_moe_expert_parallel_comm"] = True
        elif self.overlap_moe.effective == "shared_experts":
            fields["moe_shared_expert_overlap"] = True
        if self.delay_wgrad_compute.effective:
            # tensor_parallel userbuffers of the same gradient exclude it (TE, WeightGradStore).
            fields |= {"delay_wgrad_compute": True, "tp_comm_bulk_wgrad": False}
        return fields

    @property
    def ddp_fields(self) -> dict[str, object]:
        """Fields of the engine's DDP config, which has to know of delayed gradients as well."""
        return {"delay_wgrad_compute": True} if self.delay_wgrad_compute.effective else {}


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why a setting cannot work; its sentence begins with the setting."""

    code: str
    relation: str
    fix: str


def place_of(layout: Layout, topology: Topology | None) -> GroupPlace | None:
    """Where the expert-parallel groups lie; ``None`` if the machines are not known."""
    return None if topology is None else place_groups(layout, topology)["ep"]


def is_rack(topology: Topology | None) -> bool:
    """Whether the NVLink domain spans nodes (NVL72)."""
    return topology is not None and topology.gpus_per_nvlink_domain > topology.gpus_per_node


def is_spread(place: GroupPlace, facts: ExpertFacts) -> bool:
    """Whether a package may beat plain all-to-all: over the network, or over a rack's nodes."""
    return place.reach == "network" or (is_rack(facts.topology) and place.nodes > 1)


def version_text(version: tuple[int, ...]) -> str:
    """Release numbers as they are written."""
    return ".".join(str(number) for number in version)
