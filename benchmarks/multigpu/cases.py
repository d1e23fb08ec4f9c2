"""What a rank of a case is to run, as a value that travels through a pipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

ONE_ORDER = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
"""What the strategy wants before Blackwell where tp or cp communication is to run under GEMMs."""
MANY_QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
"""What it wants for the overlap of experts."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration of a training run."""

    name: str
    model: str
    """Of ``models.MODELS``."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Of the model's dimensions."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Fields of TransformerConfig, for the engine's model."""
    framework: Literal["mcore", "ddp", "fsdp"] = "mcore"
    """MCoreStrategy with the engine's model, or Lightning's own strategies with the plain twin."""
    strategy: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of MCoreStrategy, or of Lightning's."""
    precision: Any = "bf16-mixed"
    micro_batch: int = 1
    microbatches: tuple[int, ...] = (1,)
    """Numbers per step and data-parallel rank, each measured in its turn."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that must be set before CUDA starts."""
    needs: tuple[str, ...] = ()
    """Modules without which the case is skipped; ``"gpu"`` stands for GPUs."""
    lateness: bool = False
    """Whether to find out how often the GPU waited for the host."""

    @property
    def pp(self) -> int:
        """Pipeline size."""
        return int(self.strategy.get("pp", 1))

    @property
    def vpp(self) -> int:
        """Chunks per rank."""
        return int(self.strategy.get("vpp") or 1)

    def data_parallel(self, world: int) -> int:
        """Data-parallel size on ``world`` ranks."""
        sizes = [int(self.strategy.get(name, 1)) for name in ("tp", "pp", "cp")]
        return world // (sizes[0] * sizes[1] * sizes[2])


@dataclass(frozen=True, kw_only=True)
class Group:
    """Cases that are measured in turns with a baseline."""

    item: str
    name: str
    baseline: Case
    variants: tuple[Case, ...]
    world: int | None = None
    """Ranks; ``None``: all GPUs."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is run of each case."""

    warmup: int = 4
    """Steps before the first block of each number of microbatches."""
    rounds: int = 3
    """Blocks of each side, in turns."""
    steps: int = 8
    """Steps in a block of the fewest microbatches; more microbatches, fewer steps, at least 2."""
    lead: int = 1
    """Steps of a block before its time starts: the other side had the GPU."""
    window: int = 2
    """Steps that CommTimings records."""

    def steps_of(self, case: Case, microbatches: int) -> int:
        """Steps in a block."""
        return max(2, self.steps * min(case.microbatches) // microbatches)
