"""What switches are decided on, and what becomes of each: plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from lightning_mcore.config import CudaGraphs, ModelDims
from lightning_mcore.layout import Layout
from lightning_mcore.topology import Topology

__all__ = ["PRECISIONS", "Evidence", "Facts", "Switch", "Switches", "copies", "copies_text"]

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-mixed")
"""Values of ``Trainer(precision=...)`` that the engine can train in."""

Evidence: TypeAlias = Literal["", "assert", "recipe", "doc", "candidate"]
"""What a choice of ours rests on: the engine's own checks or plain necessity (``"assert"``), the
settings of published recipes (``"recipe"``), a statement of the engine's documentation (``"doc"``).
``"candidate"``: left as the safe choice, but worth measuring on and off, since the other may or may
not gain anything."""

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What is known about the installation, the hardware, the model and the optimizer."""

    engine_version: tuple[int, ...]
    """Release numbers of megatron-core, for example ``(0, 16, 1)``."""
    on_gpu: bool
    """Whether parameters live on CUDA devices; otherwise the engine runs on CPU over gloo."""
    precision: str
    """``Trainer(precision=...)``, one of ``PRECISIONS``."""
    native_model: bool | None = None
    """``True`` for plain torch modules, ``False`` for Megatron layers, ``None`` if unknown yet."""
    optimizer: str | None = None
    """``"adam"``, ``"adamw"``, ``"adam_l2"`` (weight decay added to the gradient), ``"sgd"``,
    ``"other"``, or ``None`` if not configured yet."""
    has_te_or_apex: bool = False
    """Whether TransformerEngine or Apex is installed: their norms allow sequence parallelism."""
    te_version: tuple[int, ...] | None = None
    """Release numbers of TransformerEngine, ``None`` if it is not installed."""
    torch_version: tuple[int, ...] = ()
    """Release numbers of torch, empty if not told."""
    has_fused_wgrad: bool = False
    """Whether Apex's ``fused_weight_gradient_mlp_cuda`` is installed, which adds weight gradients
    to the gradient buffer inside the matrix product."""
    has_einops: bool = True
    """Whether the package einops is installed."""
    torch_norms_only: bool = False
    """Whether the model turned out to use the engine's torch norms, which refuse sequence
    parallelism on GPUs whatever is installed."""
    per_token_loss: bool = False
    """Whether steps tell the tokens behind their loss, by which gradients are then divided."""
    hooks_see_gradients: bool = False
    """Whether code of the user's runs between the backward pass and the optimizer step."""
    dims: ModelDims = field(default_factory=ModelDims)
    """Dimensions that the LightningModule declares."""
    topology: Topology | None = None
    """The machines, ``None`` if unknown."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that communication libraries read."""

    @property
    def version_text(self) -> str:
        """The engine's version as it is written."""
        return ".".join(str(number) for number in self.engine_version)

    @property
    def multicast(self) -> bool:
        """Whether NVLink multicast (NVLS) may be used."""
        if self.environment.get("NCCL_NVLS_ENABLE") == "0":
            return False
        return self.topology is None or self.topology.multicast


@dataclass(frozen=True, slots=True)
class Switch(Generic[_T]):
    """One switch: what was asked, what the engine gets, and why."""

    name: str
    """The strategy's argument, or the engine's field where there is no argument."""
    requested: Any
    """The user's value; ``None`` if it was left to us or cannot be set."""
    effective: _T
    """What the engine gets."""
    reason: str
    """Why, as one line without a full stop; ``"requested"`` where the user decided."""
    evidence: Evidence = ""
    """What a choice of ours rests on; empty where the user decided or nothing is to be chosen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Switches:
    """Every switch of a run. Made by ``resolve_switches``."""

    sequence_parallel: Switch[bool]
    """Activations outside tensor-parallel regions sharded along the sequence."""
    tp_comm_overlap: Switch[bool]
    """Tensor-parallel transfers overlapped with matrix products by TransformerEngine's
    userbuffers."""
    overlap_grad_reduce: Switch[bool]
    """Gradients reduced during the backward pass."""
    overlap_param_gather: Switch[bool]
    """Parameters gathered during the forward pass."""
    align_param_gather: Switch[bool]
    """Gathers of all pipeline stages started at the same time."""
    use_distributed_optimizer: Switch[bool]
    """Optimizer state sharded over data-parallel ranks."""
    num_distributed_optimizer_instances: Switch[int]
    """Copies of the distributed optimizer's shards."""
    bucket_size: Switch[int | None]
    """Parameters (elements) per gradient bucket; ``None`` is one bucket for all."""
    grad_reduce_in_fp32: Switch[bool]
    """Gradients accumulated and reduced in fp32 whatever the parameters' dtype."""
    average_in_collective: Switch[bool]
    """Gradients averaged by NCCL instead of being scaled before the sum."""
    nccl_ub: Switch[bool]
    """Gradient and parameter buffers registered with NCCL."""
    overlap_p2p: Switch[bool]
    """Transfers between stages during computation."""
    overlap_p2p_warmup_flush: Switch[bool]
    """The same in the pipeline's warm-up and flush."""
    batch_p2p: Switch[bool]
    """Transfers between stages in one batch; the alternative to ``overlap_p2p``."""
    batch_p2p_sync: Switch[bool]
    """The host waits for the device after each such batch."""
    microbatch_group_size_per_vp_stage: Switch[int | None]
    """Microbatches that a chunk runs in a row; ``None`` without an interleaved pipeline."""
    deallocate_pipeline_outputs: Switch[bool]
    """Stage outputs freed once they are sent."""
    defer_embedding_wgrad: Switch[bool]
    """Weight gradient of the output layer computed in the pipeline's flush."""
    gradient_accumulation_fusion: Switch[bool]
    """Weight gradients added to the gradient buffer inside the matrix product."""
    cuda_graphs: Switch[CudaGraphs]
    """Kind of CUDA graphs that training replays, or ``False``."""
    cp_comm_type: Switch[str | None]
    """How context-parallel ranks exchange keys and values; ``None`` at ``cp = 1``."""
    hierarchical_context_parallel_sizes: Switch[tuple[int, ...] | None]
    """Ranks of the inner and outer level of ``a2a+p2p``."""
    nccl_communicators: Switch[Mapping[str, Mapping[str, Any]]]
    """NCCL settings by process group."""
    high_priority_streams: Switch[tuple[str, ...]]
    """Process groups whose kernels run on streams of high priority."""


def copies(layout: Layout) -> int:
    """The most ranks that hold the same parameters; experts can have more copies than the rest."""
    return max(layout.dp_cp, layout.edp)


def copies_text(layout: Layout, nothing_to: str = "") -> str:
    """The number of copies in words, followed by what is needless if there is one only."""
    if layout.edp > layout.dp_cp:
        text = f"{layout.edp} copies of each expert"
    else:
        text = f"dp = {layout.dp}" if layout.cp == 1 else f"dp x cp = {layout.dp_cp}"
    return f"{text}: nothing to {nothing_to}" if nothing_to else text
