"""What the user asked for, as values that check themselves.

Enters: arguments of the strategy and the model's own dimensions. Leaves: frozen dataclasses whose
fields have the right types and ranges. Relations to the number of ranks are checked in ``layout``,
relations between switches in ``switches``. Pure; every rank makes the same values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal, TypeAlias, get_args

from lightning_mcore.errors import ConfigurationError
from lightning_mcore.userbuffers import TPCommOverlap

__all__ = [
    "Auto",
    "Comm",
    "CpCommType",
    "CudaGraphs",
    "Fsdp",
    "ModelDims",
    "ParallelSizes",
    "SwitchRequest",
]

Auto: TypeAlias = bool | Literal["auto"]
"""A switch: ``True`` and ``False`` bind (an error if impossible), ``"auto"`` lets us choose."""

Comm: TypeAlias = Literal["safe", "auto", "max"]
"""What ``"auto"`` means for the switches that overlap communication with compute."""

CpCommType: TypeAlias = Literal["p2p", "all_gather", "a2a", "a2a+p2p"]
"""How context-parallel ranks exchange keys and values; ``"a2a"`` is known as Ulysses."""

CudaGraphs: TypeAlias = bool | Literal["transformer_engine", "local", "full_iteration", "auto"]
"""What of a training step is replayed from CUDA graphs. ``True`` is refused: there are several
kinds."""

Fsdp: TypeAlias = Literal["optim", "optim_grads", "optim_grads_params"]
"""What Megatron-FSDP would shard."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelSizes:
    """Into how many ways each axis of the rank grid is cut; data parallelism takes what is left.

    Raises:
        ConfigurationError: If a size is not an integer of at least 1, or ``vpp`` has no pipeline.
    """

    tp: int = 1
    """Tensor parallel ways: ranks that share each layer's matrices. 1 keeps layers whole."""
    pp: int = 1
    """Pipeline parallel ways: ranks that hold consecutive layers. 1 runs without a pipeline."""
    vpp: int | None = None
    """Model chunks per pipeline rank. ``None`` and 1 mean one chunk (1F1B); 2 or more select the
    interleaved schedule, which needs ``pp >= 2``."""
    cp: int = 1
    """Context parallel ways: ranks that share each sequence. 1 keeps sequences whole."""
    ep: int = 1
    """Expert parallel ways: ranks that hold different experts of a layer. 1 keeps them together."""
    etp: int | None = None
    """Tensor parallel ways inside each expert. ``None`` means the same as ``tp``, the engine's
    default; 1 is usually faster for small experts."""

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "cp", "ep"):
            _check_count(name, getattr(self, name))
        for name in ("vpp", "etp"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name), or_none=True)
        if self.vpp is not None and self.vpp > 1 and self.pp == 1:
            raise ConfigurationError(
                f"`vpp` ({self.vpp}) chunks per rank need `pp` (1) of at least 2: only a pipeline"
                f" can be interleaved; use pp=2 or more, or vpp=None."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class SwitchRequest:
    """Switches as the user set them; ``switches.resolve_switches`` says what becomes of them.

    docs/switches.md has, for each, what it needs, what it excludes and how to see it working.

    Raises:
        ConfigurationError: If a value has the wrong type or is out of range.
    """

    comm: Comm = "auto"
    """What ``"auto"`` means below: ``"safe"`` overlaps nothing, ``"auto"`` what recipes have on,
    ``"max"`` all that can work."""
    sequence_parallel: Auto = "auto"
    """Shards activations outside the tensor-parallel regions along the sequence, ``tp`` ways.
    ``"auto"`` turns it on with ``tp > 1`` where the layers can do it."""
    tp_comm_overlap: Auto | TPCommOverlap = "auto"
    """Hides tensor-parallel transfers under matrix products (TransformerEngine's userbuffers).
    ``True`` takes its default method for each; ``"auto"`` leaves it off and says where it is worth
    measuring."""
    overlap_grad_reduce: Auto = "auto"
    """Reduces gradients bucket by bucket during the backward pass. Every parameter must then get a
    gradient in every step. ``"auto"`` turns it on for Megatron models with ``dp x cp > 1``."""
    overlap_param_gather: Auto = "auto"
    """Gathers updated parameters during the next forward pass instead of after the optimizer step.
    Needs the distributed optimizer and ``overlap_grad_reduce``; ``"auto"`` follows them."""
    use_distributed_optimizer: Auto = "auto"
    """Shards optimizer state and main parameters over data-parallel ranks. ``"auto"`` turns it on
    for Adam and AdamW with ``dp x cp > 1``."""
    num_distributed_optimizer_instances: int | None = None
    """Copies of the optimizer's shards, each spread over ``dp x cp / N`` ranks; ``None``: 1."""
    bucket_size: int | None = None
    """Parameters (elements) per gradient bucket. ``None`` takes the engine's rule,
    ``max(40_000_000, 1_000_000 x dp)``."""
    grad_reduce_in_fp32: Auto = "auto"
    """Accumulates and reduces gradients in fp32. ``"auto"`` does so for the mixed precisions."""
    average_in_collective: Auto = "auto"
    """Lets NCCL average gradients instead of scaling them before the sum. ``"auto"`` does not."""
    nccl_ub: Auto = "auto"
    """Registers gradient and parameter buffers with NCCL. ``"auto"`` does not."""
    fsdp: Fsdp | None = None
    """Megatron-FSDP; only ``None`` is supported."""
    overlap_p2p: Auto = "auto"
    """Sends activations between pipeline stages while computing. Needs ``vpp >= 2``; ``"auto"``
    turns it on exactly then."""
    overlap_p2p_warmup_flush: Auto = "auto"
    """Does so while the pipeline fills and drains, too. Needs ``overlap_p2p``; ``"auto"`` does not.
    """
    batch_p2p: Auto = "auto"
    """Sends and receives of a step in one batch. Excludes ``overlap_p2p``; ``"auto"`` follows it.
    """
    batch_p2p_sync: Auto = "auto"
    """Waits for the whole device after each batch. Needs ``batch_p2p``; ``"auto"`` does not, but
    for ``comm="safe"``."""
    microbatch_group_size_per_vp_stage: int | None = None
    """Microbatches that a chunk runs in a row, at least ``pp``. ``None`` means ``pp``."""
    defer_embedding_wgrad: Auto = "auto"
    """Computes the output layer's weight gradient while the pipeline drains. Needs Apex; ``"auto"``
    does not."""
    gradient_accumulation_fusion: Auto = "auto"
    """Adds weight gradients to the gradient buffer inside the matrix product. ``"auto"`` does so
    with Apex."""
    cuda_graphs: CudaGraphs = "auto"
    """Replays each layer's kernels, forward and backward, from CUDA graphs. ``"auto"`` does not."""
    cp_comm_type: CpCommType | None = None
    """How context-parallel ranks exchange keys and values. ``None`` lets the topology choose."""
    nccl_communicators: Mapping[str, Any] = field(default_factory=dict)
    """NCCL settings by process group: ``{"dp_cp": {"max_ctas": 16}}``."""
    high_priority_streams: tuple[str, ...] = ()
    """Process groups whose kernels go first: ``("tp", "dp_cp")``."""
    micro_batch_size: int | None = None
    """Samples in one pass of the schedule on one data-parallel rank. ``None`` means the whole batch
    without a pipeline, and 1 with one."""
    ddp: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the engine's DDP config."""
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the engine's optimizer config."""

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name in _COUNTS:
                if value is not None:
                    _check_count(entry.name, value, or_none=True)
            elif entry.name == "cuda_graphs" and value is True:
                raise ConfigurationError(
                    "`cuda_graphs` (True) must name the kind: 'transformer_engine', 'local' or"
                    " 'auto'; use cuda_graphs='transformer_engine', or False."
                )
            elif entry.name in _CHOICES:
                _check_choice(entry.name, value, _CHOICES[entry.name])
            elif entry.name in _MAPPINGS:
                if is_dataclass(value):
                    # All of its fields are set, so those that were chosen cannot be told from
                    # defaults, nor checked against the arguments that decide the same.
                    raise ConfigurationError(
                        f"`{entry.name}` ({type(value).__name__}) must be a mapping of the fields"
                        f" that you choose: {entry.name}={{'field': value}}; what MCoreStrategy"
                        " takes as an argument, or torch's optimizer decides, is set there."
                    )
                if not isinstance(value, Mapping):
                    raise ConfigurationError(
                        f"`{entry.name}` ({value!r}) must be a mapping;"
                        f" use {entry.name}={{}} or leave it out."
                    )
            elif entry.name == "high_priority_streams":
                names = value if isinstance(value, (list, tuple)) else (value,)
                if value is names and all(isinstance(name, str) for name in names):
                    object.__setattr__(self, entry.name, tuple(names))
                else:
                    raise ConfigurationError(
                        f"`{entry.name}` ({value!r}) must be a list of names of groups;"
                        f" use {entry.name}=['dp_cp']."
                    )
            elif entry.name == "tp_comm_overlap" and isinstance(value, TPCommOverlap):
                continue
            elif not (isinstance(value, bool) or value == "auto"):
                raise ConfigurationError(
                    f"`{entry.name}` ({value!r}) must be True, False or 'auto';"
                    f" use {entry.name}='auto' to let the strategy choose."
                )

    @property
    def userbuffers(self) -> TPCommOverlap:
        """Settings of userbuffers, wherever they are on."""
        asked = self.tp_comm_overlap
        return asked if isinstance(asked, TPCommOverlap) else TPCommOverlap.rings()


_COUNTS = (
    "bucket_size",
    "micro_batch_size",
    "microbatch_group_size_per_vp_stage",
    "num_distributed_optimizer_instances",
)
_CHOICES: dict[str, tuple[str | bool | None, ...]] = {
    "comm": get_args(Comm),
    "cp_comm_type": (*get_args(CpCommType), None),
    "cuda_graphs": ("transformer_engine", "local", "full_iteration", False, "auto"),
    "fsdp": (*get_args(Fsdp), None),
}
_MAPPINGS = ("nccl_communicators", "ddp", "optimizer")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelDims:
    """Dimensions of the user's model that parallel sizes must divide; ``None`` means not told."""

    num_layers: int | None = None
    """Transformer layers (or blocks) in the whole model."""
    num_attention_heads: int | None = None
    """Query heads in each attention layer."""
    num_query_groups: int | None = None
    """Key/value heads in each attention layer (grouped-query attention)."""
    num_moe_experts: int | None = None
    """Experts in each mixture-of-experts layer."""
    seq_length: int | None = None
    """Tokens in one sequence, before context or sequence parallelism cuts it."""
    hidden_size: int | None = None
    """Width of the activations between layers."""
    multi_latent_attention: bool | None = None
    """Whether attention projects keys and values through a latent space (MLA)."""

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name == "multi_latent_attention":
                if value is not None and not isinstance(value, bool):
                    raise ConfigurationError(
                        f"`{entry.name}` of `model_dims` ({value!r}) must be True, False or None;"
                        f" use {entry.name}={bool(value)}."
                    )
            elif value is not None:
                _check_count(entry.name, value, or_none=True, where=" of `model_dims`")

    @classmethod
    def from_object(cls, source: object) -> ModelDims:
        """Reads dimensions from what the user's module declares.

        Args:
            source: A mapping with any of the field names as keys, an object with any of them as
                attributes (a TransformerConfig, say), a ``ModelDims``, or ``None`` for nothing.

        Raises:
            ConfigurationError: If a mapping has other keys, an object has none of the attributes,
                or a value is not an integer of at least 1.
        """
        if source is None:
            return cls()
        if isinstance(source, cls):
            return source
        names = [entry.name for entry in fields(cls)]
        found: dict[str, Any]
        if isinstance(source, Mapping):
            unknown = sorted(str(key) for key in source if key not in names)
            if unknown:
                raise ConfigurationError(
                    f"`model_dims` has unknown keys {unknown}; use any of {names}."
                )
            found = dict(source)
        else:
            found = {name: getattr(source, name) for name in names if hasattr(source, name)}
            if not found:
                raise ConfigurationError(
                    f"`model_dims` ({type(source).__name__}) must be a mapping, or an object with"
                    f" attributes, of model dimensions; use any of {names}."
                )
        return cls(**found)


def _check_choice(name: str, value: object, choices: tuple[str | bool | None, ...]) -> None:
    # A number equal to False is no choice.
    if not any(value is choice or (value == choice and choice is not False) for choice in choices):
        known = ", ".join(repr(choice) for choice in choices)
        raise ConfigurationError(
            f"`{name}` ({value!r}) must be one of {known}; use {name}={choices[-1]!r}."
        )


def _check_count(name: str, value: object, *, or_none: bool = False, where: str = "") -> None:
    """Refuses what is not an integer of at least 1; True is an int to Python, but not a size."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        alternative = " or None" if or_none else ""
        raise ConfigurationError(
            f"`{name}`{where} ({value!r}) must be an integer of at least 1{alternative};"
            f" use {name}={_closest_count(value)}{alternative}."
        )


def _closest_count(value: object) -> int:
    """A count the user may have meant: 2.0 and '2' are close to 2, all else to 1."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return 1
    return max(1, int(number)) if number == number and number < 2**63 else 1
