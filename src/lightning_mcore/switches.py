"""From what the user asked for to what the engine gets, and why: no switch changes in silence.

Enters: a ``SwitchRequest``, a ``Layout`` and ``Facts`` about the installation and the model.
Leaves: ``Switches``, each with its effective value and the reason, or a ConfigurationError that
every rank raises alike. Pure. The strategy asks twice: before any process group exists, when the
model and the optimizer are not known yet (``None`` in ``Facts``), and again once they are.

Three rules hold throughout. An explicit ``True`` or ``False`` is obeyed or refused, never changed.
``"auto"`` may choose, and tells why. A switch that nobody can set (its request is ``None``) follows
from the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from lightning_mcore.config import Auto, SwitchRequest
from lightning_mcore.errors import ConfigurationError
from lightning_mcore.layout import Layout

__all__ = ["PRECISIONS", "Facts", "Switch", "Switches", "resolve_switches"]

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-mixed")
"""Values of ``Trainer(precision=...)`` that the engine can train in."""

_ADAM_KINDS = ("adam", "adamw", "adam_l2")

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
    torch_norms_only: bool = False
    """Whether the model turned out to use the engine's torch norms, which refuse sequence
    parallelism on GPUs whatever is installed."""
    num_optimizer_instances: int = 1
    """The engine's ``num_distributed_optimizer_instances``: copies of the optimizer's shards."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Switches:
    """Every switch of a run. Made by ``resolve_switches``."""

    sequence_parallel: Switch[bool]
    """Activations outside tensor-parallel regions sharded along the sequence."""
    overlap_grad_reduce: Switch[bool]
    """Gradients reduced during the backward pass."""
    overlap_param_gather: Switch[bool]
    """Parameters gathered during the forward pass."""
    use_distributed_optimizer: Switch[bool]
    """Optimizer state sharded over data-parallel ranks."""
    overlap_p2p: Switch[bool]
    """Transfers between stages during computation."""
    batch_p2p: Switch[bool]
    """Transfers between stages in one batch; the alternative to ``overlap_p2p``."""
    deallocate_pipeline_outputs: Switch[bool]
    """Stage outputs freed once they are sent."""
    grad_reduce_in_fp32: Switch[bool]
    """Gradients accumulated and reduced in fp32 whatever the parameters' dtype."""
    bucket_size: Switch[int | None]
    """Parameters (elements) per gradient bucket; ``None`` is one bucket for all."""


def resolve_switches(request: SwitchRequest, layout: Layout, facts: Facts) -> Switches:
    """Decides every switch for this layout and these facts.

    Raises:
        ConfigurationError: If an explicit value cannot work with the rest, or a precision or a
            parallel size is not supported; on every rank alike.
    """
    _check_precision(facts.precision)
    _check_context_parallel(layout)
    _check_expert_tensor_parallel(layout, facts)
    sequence = _sequence_parallel(request.sequence_parallel, layout, facts)
    sharded = _use_distributed_optimizer(request, layout, facts)
    _check_optimizer_instances(sharded, layout, facts.num_optimizer_instances)
    reduce = _overlap_grad_reduce(request, layout, facts)
    overlap = _overlap_p2p(request.overlap_p2p, layout)
    return Switches(
        sequence_parallel=sequence,
        overlap_grad_reduce=reduce,
        overlap_param_gather=_overlap_param_gather(request, sharded, reduce, facts),
        use_distributed_optimizer=sharded,
        overlap_p2p=overlap,
        batch_p2p=_batch_p2p(overlap.effective, layout),
        deallocate_pipeline_outputs=_deallocate_pipeline_outputs(overlap.effective, layout, facts),
        grad_reduce_in_fp32=_grad_reduce_in_fp32(facts.precision),
        bucket_size=_bucket_size(request, reduce, layout),
    )


def _check_precision(precision: str) -> None:
    if precision not in PRECISIONS:
        closest = "32-true" if precision.startswith("64") else "bf16-mixed"
        raise ConfigurationError(
            f"`precision` ({precision!r}) must be one of {', '.join(PRECISIONS)};"
            f" use Trainer(precision={closest!r})."
        )


def _check_context_parallel(layout: Layout) -> None:
    """The one place that keeps context parallelism closed; delete it to open it."""
    if layout.cp > 1:
        raise ConfigurationError(
            f"`cp` ({layout.cp}) must be 1 in this release: training with context parallelism needs"
            " TransformerEngine's attention and a loss weighted by tokens, and with a plain mean"
            f" gradients would come out {layout.cp} times too large; use cp=1 and cut memory with"
            " `tp` and sequence_parallel."
        )


def _check_expert_tensor_parallel(layout: Layout, facts: Facts) -> None:
    if not facts.on_gpu and layout.ep > 1 and layout.etp > 1:
        raise ConfigurationError(
            f"`etp` ({layout.etp}) with `ep` ({layout.ep}) needs GPUs: gloo cannot gather the"
            " unequal numbers of tokens that ranks send to experts; use etp=1 on CPU."
        )


def _sequence_parallel(asked: Auto, layout: Layout, facts: Facts) -> Switch[bool]:
    name, tp, ep = "sequence_parallel", layout.tp, layout.ep
    no_torch_norm = facts.on_gpu and not facts.has_te_or_apex
    if asked is True:
        if tp == 1:
            raise ConfigurationError(
                "`sequence_parallel` (True) needs `tp` (1) of at least 2: it shards activations"
                " over tensor-parallel ranks; use tp=2 or more, or sequence_parallel='auto'."
            )
        if facts.native_model:
            raise ConfigurationError(
                "`sequence_parallel` (True) needs Megatron layers, and the model has only plain"
                " torch modules, which do not shard the sequence; use layers of megatron.core, or"
                " sequence_parallel='auto'."
            )
        caution = "; norms must come from TransformerEngine, Apex or the model itself"
        return Switch(name, asked, True, "requested" + (caution if no_torch_norm else ""))
    mandatory = tp > 1 and ep > 1
    if asked is False:
        if mandatory:
            raise ConfigurationError(
                f"`sequence_parallel` (False) must be on with `tp` ({tp}) and `ep` ({ep}) both"
                " above 1: the engine's experts take sequence shards; use"
                " sequence_parallel='auto', or tp=1."
            )
        return Switch(name, asked, False, "requested")
    if tp == 1:
        return Switch(name, asked, False, "tp = 1")
    if facts.native_model:
        return Switch(name, asked, False, "plain torch modules do not shard the sequence")
    if mandatory:
        return Switch(name, asked, True, f"tp = {tp} with ep = {ep} needs it")
    if facts.torch_norms_only:
        return Switch(name, asked, False, "the model's torch norms refuse it on GPUs")
    if no_torch_norm:
        reason = "without TransformerEngine or Apex the engine's norms refuse it on GPUs"
        return Switch(name, asked, False, reason)
    return Switch(name, asked, True, f"tp = {tp}")


def _use_distributed_optimizer(
    request: SwitchRequest, layout: Layout, facts: Facts
) -> Switch[bool]:
    name, asked = "use_distributed_optimizer", request.use_distributed_optimizer
    obstacle, fix = None, ""
    if facts.optimizer is not None and facts.optimizer not in _ADAM_KINDS:
        obstacle = f"the engine shards the state of Adam and AdamW only, not of {facts.optimizer!r}"
        fix = "torch.optim.AdamW in configure_optimizers"
    elif facts.precision == "bf16-true":
        obstacle = "it keeps fp32 main parameters, which bf16-true does without"
        fix = "Trainer(precision='bf16-mixed')"
    if asked is True and obstacle:
        raise ConfigurationError(
            f"`use_distributed_optimizer` (True) cannot work: {obstacle}; use {fix}, or"
            " use_distributed_optimizer='auto'."
        )
    if asked is not True and asked is not False:
        if obstacle:
            return Switch(name, asked, False, obstacle)
        if request.overlap_param_gather is True:
            return Switch(name, asked, True, "overlap_param_gather=True needs it")
        if facts.num_optimizer_instances > 1:
            count = facts.num_optimizer_instances
            return Switch(name, asked, True, f"{count} optimizer instances need it")
        if _copies(layout) == 1:
            return Switch(name, asked, False, _nothing_to("shard", layout))
        kind = f" with {facts.optimizer}" if facts.optimizer else ""
        return Switch(name, asked, True, _copies_text(layout) + kind)
    idle = f"; {_nothing_to('shard', layout)}" if asked and _copies(layout) == 1 else ""
    return Switch(name, asked, asked, f"requested{idle}")


def _check_optimizer_instances(sharded: Switch[bool], layout: Layout, count: int) -> None:
    name = "`num_distributed_optimizer_instances`"
    if count > 1 and not sharded.effective:
        raise ConfigurationError(
            f"{name} ({count}) needs `use_distributed_optimizer`, which is off ({sharded.reason});"
            " use num_distributed_optimizer_instances=1, or AdamW with the distributed optimizer."
        )
    for axis, size in (("dp x cp", layout.dp_cp), ("expert data-parallel size", layout.edp)):
        if size % count:
            raise ConfigurationError(
                f"{axis} ({size}) must be a multiple of {name} ({count}); use an instance count"
                f" that divides {size}."
            )


def _overlap_grad_reduce(request: SwitchRequest, layout: Layout, facts: Facts) -> Switch[bool]:
    name, asked = "overlap_grad_reduce", request.overlap_grad_reduce
    version = ".".join(str(number) for number in facts.engine_version)
    count = facts.num_optimizer_instances
    broken = count > 1 and facts.engine_version < (0, 17)
    if asked is True:
        if broken:
            raise ConfigurationError(
                f"`overlap_grad_reduce` (True) with `num_distributed_optimizer_instances` ({count})"
                f" gives wrong gradients on megatron-core {version}, before 0.17"
                " (NVIDIA/Megatron-LM#3670); use megatron-core 0.17 or newer, one instance, or"
                " overlap_grad_reduce=False."
            )
        if _copies(layout) == 1:
            return Switch(name, asked, True, f"requested; {_nothing_to('reduce', layout)}")
        caution = "; every parameter must get a gradient in every step"
        return Switch(name, asked, True, "requested" + (caution if facts.native_model else ""))
    if asked is False:
        return Switch(name, asked, False, "requested")
    if broken:
        reason = f"wrong gradients with {count} optimizer instances on megatron-core {version}"
        return Switch(name, asked, False, reason)
    if request.overlap_param_gather is True and not facts.native_model:
        return Switch(name, asked, True, "overlap_param_gather=True needs it")
    if _copies(layout) == 1:
        return Switch(name, asked, False, _nothing_to("reduce", layout))
    if facts.native_model:
        reason = (
            "a parameter without a gradient in some step would stop the engine; set True if"
            " every parameter gets one in every step"
        )
        return Switch(name, asked, False, reason)
    return Switch(name, asked, True, _copies_text(layout))


def _overlap_param_gather(
    request: SwitchRequest, sharded: Switch[bool], reduce: Switch[bool], facts: Facts
) -> Switch[bool]:
    name, asked = "overlap_param_gather", request.overlap_param_gather
    if asked is True:
        if facts.native_model:
            raise ConfigurationError(
                "`overlap_param_gather` (True) needs Megatron layers: the gather is awaited when a"
                " submodule is called, and plain torch code may read a weight without that; use"
                " overlap_param_gather='auto'."
            )
        for needed in (sharded, reduce):
            if not needed.effective:
                raise ConfigurationError(
                    f"`overlap_param_gather` (True) needs `{needed.name}` (False:"
                    f" {needed.reason}); use {needed.name}=True where that can work, or"
                    " overlap_param_gather='auto'."
                )
        return Switch(name, asked, True, "requested")
    if asked is False:
        return Switch(name, asked, False, "requested")
    for needed in (sharded, reduce):
        if not needed.effective:
            return Switch(name, asked, False, f"{needed.name} is off")
    if facts.native_model:
        reason = "plain torch code may read a weight before it has been gathered"
        return Switch(name, asked, False, reason)
    return Switch(name, asked, True, "distributed optimizer with overlap_grad_reduce")


def _overlap_p2p(asked: Auto, layout: Layout) -> Switch[bool]:
    """With it, the number of microbatches must be a multiple of ``pp`` (``batch`` checks that)."""
    name, pp, vpp = "overlap_p2p", layout.pp, layout.vpp
    if asked is True:
        if pp == 1:
            raise ConfigurationError(
                "`overlap_p2p` (True) needs `pp` (1) of at least 2: one stage sends nothing; use"
                " pp=2 or more, or overlap_p2p='auto'."
            )
        if vpp is None:
            raise ConfigurationError(
                f"`overlap_p2p` (True) needs `vpp` (None or 1) of at least 2 with `pp` ({pp}): the"
                " engine overlaps transfers only between the chunks of an interleaved pipeline; use"
                " vpp=2, or overlap_p2p='auto'."
            )
        return Switch(name, asked, True, "requested")
    if asked is False:
        if vpp is not None and pp == 2:
            raise ConfigurationError(
                f"`overlap_p2p` (False) with `pp` (2) and `vpp` ({vpp}) would give wrong gradients"
                " without an error: both neighbours of a rank are the same rank, and the engine's"
                " batched transfers mix up activations and gradients; use overlap_p2p=True, or"
                " vpp=None, or pp=4."
            )
        return Switch(name, asked, False, "requested")
    if pp == 1:
        return Switch(name, asked, False, "pp = 1: one stage sends nothing")
    if vpp is None:
        return Switch(name, asked, False, "needs vpp >= 2: only an interleaved pipeline overlaps")
    return Switch(name, asked, True, f"pp = {pp} with vpp = {vpp}")


def _batch_p2p(overlap: bool, layout: Layout) -> Switch[bool]:
    if layout.pp == 1:
        return Switch("batch_p2p", None, False, "pp = 1: one stage sends nothing")
    reason = "excluded by overlap_p2p" if overlap else "overlap_p2p is off"
    return Switch("batch_p2p", None, not overlap, reason)


def _deallocate_pipeline_outputs(overlap: bool, layout: Layout, facts: Facts) -> Switch[bool]:
    name = "deallocate_pipeline_outputs"
    if layout.pp == 1:
        return Switch(name, None, False, "pp = 1: one stage sends nothing")
    if not facts.on_gpu:
        return Switch(name, None, False, "on CPU a send may still be reading the tensor")
    if overlap and facts.engine_version < (0, 18):
        # NVIDIA/Megatron-LM#4047, in 0.18.0, waits for the send before it frees the tensor.
        reason = "before megatron-core 0.18 overlap_p2p may still be sending the tensor"
        return Switch(name, None, False, reason)
    if facts.native_model:
        # The engine asserts that what it frees is not a view, which a plain module may return.
        return Switch(name, None, False, "the output of plain torch modules may be a view")
    return Switch(name, None, True, f"pp = {layout.pp} on GPU: saves memory")


def _grad_reduce_in_fp32(precision: str) -> Switch[bool]:
    name = "grad_reduce_in_fp32"
    if precision.endswith("-mixed"):
        return Switch(name, None, True, f"{precision} sums gradients in fp32")
    same = "fp32 already" if precision == "32-true" else "bf16, as the parameters"
    return Switch(name, None, False, f"{precision}: gradients are {same}")


def _bucket_size(
    request: SwitchRequest, reduce: Switch[bool], layout: Layout
) -> Switch[int | None]:
    name, asked = "bucket_size", request.bucket_size
    if not reduce.effective:
        if asked is not None and request.overlap_grad_reduce is False:
            raise ConfigurationError(
                f"`bucket_size` ({asked}) has no effect with `overlap_grad_reduce` (False), which"
                " reduces all gradients at once; use bucket_size=None, or"
                " overlap_grad_reduce='auto'."
            )
        return Switch(name, asked, None, "one bucket: overlap_grad_reduce is off")
    # The engine splits into buckets only where the reduction is on the critical path.
    where = " on the first stage, one bucket on the others" if layout.pp > 1 else ""
    if asked is not None:
        return Switch(name, asked, asked, f"requested{where}")
    size = max(40_000_000, 1_000_000 * layout.dp)
    return Switch(name, None, size, f"the engine's rule max(40M, 1M x dp){where}")


def _copies(layout: Layout) -> int:
    """The most ranks that hold the same parameters; experts can have more copies than the rest."""
    return max(layout.dp_cp, layout.edp)


def _copies_text(layout: Layout) -> str:
    if layout.edp > layout.dp_cp:
        return f"{layout.edp} copies of each expert"
    return f"dp = {layout.dp}" if layout.cp == 1 else f"dp x cp = {layout.dp_cp}"


def _nothing_to(what: str, layout: Layout) -> str:
    return f"{_copies_text(layout)}: nothing to {what}"
