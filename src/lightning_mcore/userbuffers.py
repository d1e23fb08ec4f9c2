"""Settings of tensor-parallel transfers under matrix products: TransformerEngine's userbuffers.

Frozen values that check what does not depend on a run. TransformerEngine checks little of it: a
misspelt GEMM is ignored there, and one that gathers in bulk where it should scatter is accepted.
Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias, get_args

from lightning_mcore.errors import ConfigurationError

__all__ = ["COLUMN_DGRAD", "PIPELINE_SPLITS", "GemmOverlap", "TPCommOverlap"]

Method: TypeAlias = Literal["bulk", "ring_exchange", "pipeline"]
"""How a transfer is hidden: ``"bulk"`` runs it whole beside an unrelated GEMM, ``"ring_exchange"``
sends chunks around the ring of ranks as the GEMM takes or gives them, ``"pipeline"`` cuts the GEMM
into chunks and reduces each while the next is computed."""

Quantization: TypeAlias = Literal["none", "fp8", "fp8+none"]
"""Which layers compute in fp8: none, all, or all but bf16 ones at either end."""

_ALLOWED: Mapping[str, tuple[Method, ...]] = {
    "qkv_fprop": ("ring_exchange",),
    "fc1_fprop": ("ring_exchange",),
    "proj_dgrad": ("ring_exchange",),
    "fc2_dgrad": ("ring_exchange",),
    "proj_fprop": ("pipeline", "ring_exchange"),
    "fc2_fprop": ("pipeline", "ring_exchange"),
    "qkv_dgrad": ("bulk", "pipeline", "ring_exchange"),
    "fc1_dgrad": ("bulk", "pipeline", "ring_exchange"),
    "qkv_wgrad": ("bulk",),
    "fc1_wgrad": ("bulk",),
}
"""GEMMs by TransformerEngine's name. The first four gather their input, the next two scatter their
output; a column layer's dgrad hides the gather of its input (bulk) or scatters its own output."""

COLUMN_DGRAD = ("qkv_dgrad", "fc1_dgrad")
"""The dgrad GEMMs of column-parallel layers."""
_ROW_FPROP = ("proj_fprop", "fc2_fprop")
_GATHERING = ("qkv_fprop", "fc1_fprop", "proj_dgrad", "fc2_dgrad")

_MAX_SM = 32
"""UB_MAX_SM of TransformerEngine (comm_gemm_overlap.h)."""

PIPELINE_SPLITS = 4
"""TransformerEngine's own default (pytorch/module/base.py, get_default_config)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmOverlap:
    """How the transfer of one GEMM is hidden.

    ``num_sm``, ``cga_size`` and ``set_sm_margin`` are always handed over together: when only the
    method changes, TransformerEngine keeps the other method's values.

    Raises:
        ConfigurationError: If a value is out of range or has no effect with the method.
    """

    method: Method
    """``"bulk"``, ``"ring_exchange"`` or ``"pipeline"``."""
    num_splits: int | None = None
    """Chunks of a pipelined GEMM; ``None`` means 4. A ring has one chunk per rank, always."""
    num_sm: int | None = None
    """Multiprocessors that communicate, up to 32. ``None``: 1 in a ring, else 16."""
    cga_size: int | None = None
    """Thread blocks in a cluster of the communication kernel. ``None``: 1 in a ring, else 2."""
    set_sm_margin: bool | None = None
    """Whether GEMMs leave ``num_sm`` multiprocessors free. ``None``: not in a ring."""
    aggregate: bool = False
    """Whether a ring sends two chunks at a time; helps where chunks are small."""
    use_ce: bool = True
    """Whether a ring copies with copy engines rather than multiprocessors."""
    fp8_buf: bool = False
    """Whether a pipelined reduce-scatter travels in fp8, where layers compute in fp8."""

    def __post_init__(self) -> None:
        if self.method not in get_args(Method):
            raise ConfigurationError(
                f"`method` ({self.method!r}) of a GEMM must be one of"
                f" {', '.join(get_args(Method))}; use method='ring_exchange'."
            )
        for name, most in (("num_splits", None), ("num_sm", _MAX_SM), ("cga_size", _MAX_SM)):
            value = getattr(self, name)
            if value is not None and (
                isinstance(value, bool)
                or not isinstance(value, int)
                or value < 1
                or (most is not None and value > most)
            ):
                above = f" and at most {most}" if most else ""
                raise ConfigurationError(
                    f"`{name}` ({value!r}) of a GEMM must be an integer of at least 1{above}, or"
                    f" None; use {name}=None."
                )
        if self._num_sm % self._cga_size:
            raise ConfigurationError(
                f"`num_sm` ({self._num_sm}) must be a multiple of `cga_size` ({self._cga_size}),"
                " which groups thread blocks of the communication kernel; use cga_size=1."
            )
        for name, needed in (
            ("num_splits", "pipeline"),
            ("aggregate", "ring_exchange"),
            ("fp8_buf", "pipeline"),
        ):
            value = getattr(self, name)
            if value and self.method != needed:
                raise ConfigurationError(
                    f"`{name}` ({value}) has no effect with `method` ({self.method!r}), only with"
                    f" {needed!r}; leave it out, or use method={needed!r} where the GEMM allows it."
                )

    @property
    def _is_ring(self) -> bool:
        return self.method == "ring_exchange"

    @property
    def _num_sm(self) -> int:
        return self.num_sm if self.num_sm is not None else 1 if self._is_ring else 16

    @property
    def _cga_size(self) -> int:
        return self.cga_size if self.cga_size is not None else 1 if self._is_ring else 2

    def entry(self, tp: int) -> dict[str, Any]:
        """The GEMM's entry in ``ub_cfgs``."""
        margin = self.set_sm_margin
        common = {
            "method": self.method,
            "num_sm": self._num_sm,
            "cga_size": self._cga_size,
            "set_sm_margin": margin if margin is not None else not self._is_ring,
        }
        if self._is_ring:
            return common | {"num_splits": tp, "aggregate": self.aggregate, "use_ce": self.use_ce}
        if self.method == "pipeline":
            splits = self.num_splits or PIPELINE_SPLITS
            return common | {"num_splits": splits, "fp8_buf": self.fp8_buf}
        return common


@dataclass(frozen=True, kw_only=True, slots=True)
class TPCommOverlap:
    """Hides tensor-parallel transfers under GEMMs with TransformerEngine's userbuffers.

    Without arguments, as TransformerEngine does by default.

    Raises:
        ConfigurationError: If a GEMM is unknown, its method cannot do its transfer, or entries
            contradict each other or the switches below.
    """

    gemms: dict[str, GemmOverlap] = field(default_factory=dict)
    """By GEMM, what to do other than TransformerEngine's default for it; values can be mappings of
    ``GemmOverlap``'s fields. GEMMs that gather (``qkv_fprop``, ``fc1_fprop``, ``proj_dgrad``,
    ``fc2_dgrad``) take ``ring_exchange``; those that scatter (``proj_fprop``, ``fc2_fprop``) take
    ``pipeline`` (the default) or ``ring_exchange``; ``qkv_dgrad`` and ``fc1_dgrad`` take ``bulk``
    (the default) or, both of them, one of the other two, which ends the bulk overlap of
    ``qkv_wgrad`` and ``fc1_wgrad``."""
    all_gather: bool = True
    """Hides all-gathers under the GEMMs that take their result."""
    reduce_scatter: bool = True
    """Hides reduce-scatters under the forward GEMMs that give their input."""
    bulk_dgrad: bool = True
    """Hides the gather of a column layer's input under its dgrad GEMM."""
    bulk_wgrad: bool = True
    """Hides the scatter of a column layer's dgrad under its wgrad GEMM."""
    quantization: Quantization = "none"
    """``"fp8"`` where the model's config sets ``fp8``, ``"fp8+none"`` where it also sets
    ``first_last_layers_bf16``: buffers are made for each before the model is built."""
    bootstrap_backend: Literal["gloo", "nccl", "mpi"] = "gloo"
    """Backend of the group over which ranks exchange the addresses of their buffers."""

    def __post_init__(self) -> None:
        for name, known in (
            ("quantization", get_args(Quantization)),
            ("bootstrap_backend", ("gloo", "nccl", "mpi")),
        ):
            if getattr(self, name) not in known:
                raise ConfigurationError(
                    f"`{name}` ({getattr(self, name)!r}) of `tp_comm_overlap` must be one of"
                    f" {', '.join(known)}; use {name}={known[0]!r}."
                )
        entries = {name: _as_gemm(name, value) for name, value in self.gemms.items()}
        object.__setattr__(self, "gemms", entries)
        for name, entry in entries.items():
            _check_gemm(name, entry, self)
        self._check_dgrads()
        if not (self.all_gather or self.reduce_scatter or self.bulk_dgrad or self.bulk_wgrad):
            raise ConfigurationError(
                "`tp_comm_overlap` has `all_gather`, `reduce_scatter`, `bulk_dgrad` and"
                " `bulk_wgrad` all False, which hides nothing; use tp_comm_overlap=False."
            )

    @classmethod
    def rings(cls) -> TPCommOverlap:
        """Every transfer around the ring of ranks, also of what column layers hand back.

        What ``tp_comm_overlap=True`` means. Of the settings that were measured it was the fastest
        (benchmarks/RESULTS.md); TransformerEngine's own, ``TPCommOverlap()``, were slower than no
        overlap there.
        """
        ring = GemmOverlap(method="ring_exchange")
        return cls(gemms=dict.fromkeys((*_ROW_FPROP, *COLUMN_DGRAD), ring))

    @property
    def rs_dgrad(self) -> bool:
        """Whether column layers scatter the output of their dgrad GEMM under that GEMM."""
        return any(
            name in self.gemms and self.gemms[name].method != "bulk" for name in COLUMN_DGRAD
        )

    def _check_dgrads(self) -> None:
        """One flag of the engine (tp_comm_overlap_rs_dgrad) is for both column layers."""
        methods = {
            name: self.gemms[name].method if name in self.gemms else "bulk" for name in COLUMN_DGRAD
        }
        if not self.rs_dgrad:
            return
        left = [name for name, method in methods.items() if method == "bulk"]
        if left:
            raise ConfigurationError(
                f"`{left[0]}` (bulk) and `{next(n for n in methods if n not in left)}`"
                f" ({next(m for m in methods.values() if m != 'bulk')}) must both scatter or both"
                " gather in bulk, since one flag of the engine is for both; give both"
                " method='ring_exchange' or 'pipeline'."
            )
        wgrads = [name for name in ("qkv_wgrad", "fc1_wgrad") if name in self.gemms]
        if wgrads:
            raise ConfigurationError(
                f"`{wgrads[0]}` has nothing to hide where `{wgrads[0].replace('wgrad', 'dgrad')}`"
                " scatters its own output; leave it out, or use method='bulk' for the dgrad GEMMs."
            )


def _as_gemm(name: str, value: Any) -> GemmOverlap:
    if name not in _ALLOWED:
        riding = {"proj_wgrad": "proj_dgrad", "fc2_wgrad": "fc2_dgrad"}
        if name in riding:
            raise ConfigurationError(
                f"`{name}` cannot be set: it takes what `{riding[name]}` gathered; set"
                f" `{riding[name]}`."
            )
        raise ConfigurationError(
            f"`tp_comm_overlap` names a GEMM {name!r}, which TransformerEngine would ignore; use"
            f" any of {', '.join(_ALLOWED)}."
        )
    if isinstance(value, GemmOverlap):
        return value
    known = [item.name for item in fields(GemmOverlap)]
    unknown = sorted(set(value) - set(known)) if isinstance(value, Mapping) else None
    if unknown is None or unknown or "method" not in value:
        raise ConfigurationError(
            f"`{name}` of `tp_comm_overlap` ({value!r}) must be a GemmOverlap or a mapping with"
            f" `method` and any of {known[1:]}; use {{'method': {_ALLOWED[name][0]!r}}}."
        )
    return GemmOverlap(**value)


def _check_gemm(name: str, entry: GemmOverlap, asked: TPCommOverlap) -> None:
    if entry.method not in _ALLOWED[name]:
        what = "gathers its input" if name in _GATHERING else "does not work that way"
        raise ConfigurationError(
            f"`{name}` ({entry.method}) {what}; use {' or '.join(map(repr, _ALLOWED[name]))}."
        )
    flag = (
        "all_gather"
        if name in _GATHERING
        else "reduce_scatter"
        if name in _ROW_FPROP
        else "bulk_wgrad"
        if name.endswith("wgrad")
        else "bulk_dgrad"
        if entry.method == "bulk"
        else None
    )
    if flag is not None and not getattr(asked, flag):
        raise ConfigurationError(
            f"`{name}` ({entry.method}) has no effect with `{flag}` (False); use {flag}=True, or"
            " leave the entry out."
        )
    if entry.fp8_buf and asked.quantization == "none":
        raise ConfigurationError(
            f"`fp8_buf` (True) of `{name}` needs layers that compute in fp8, and `quantization` is"
            " 'none'; use quantization='fp8', or fp8_buf=False."
        )
