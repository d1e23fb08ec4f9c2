"""From the settings of userbuffers to the arguments of TransformerEngine's ``initialize_ub``.

Enters: ``TPCommOverlap`` and the sizes of the run. Leaves: a ``UserbuffersPlan``, or a
ConfigurationError that every rank raises alike before process groups exist. TransformerEngine
checks little of it: a wrong shape fails inside a kernel launch, and without sequence parallelism
nothing happens at all. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lightning_mcore.errors import ConfigurationError
from lightning_mcore.userbuffers import COLUMN_DGRAD, PIPELINE_SPLITS, TPCommOverlap

__all__ = [
    "UserbuffersPlan",
    "check_quantization",
    "plan_userbuffers",
    "userbuffers_environment",
    "userbuffers_fields",
]

_PRECISIONS = ("bf16-mixed", "bf16-true")


@dataclass(frozen=True, kw_only=True, slots=True)
class UserbuffersPlan:
    """Arguments of TransformerEngine's ``initialize_ub``."""

    seq_length: int
    """Tokens in a whole sequence."""
    micro_batch_size: int
    """Samples in a microbatch."""
    shape: tuple[int, int]
    """Of each buffer: ``(seq_length * micro_batch_size / cp, hidden_size)``."""
    tp: int
    """Tensor-parallel size."""
    quantization_modes: tuple[Literal["NONE", "FP8"], ...]
    """Buffers are made for each, by TransformerEngine's name."""
    ub_cfgs: tuple[Mapping[str, Mapping[str, Any]], ...]
    """By mode, the entries that differ from TransformerEngine's defaults."""
    bootstrap_backend: str
    """Of the group over which buffers are exchanged."""

    def check_microbatch(self, seq_length: int, micro_batch_size: int) -> None:
        """Checks a microbatch against the buffers, whose shape cannot change.

        Raises:
            ConfigurationError: If it has other sizes; TransformerEngine would fail in a kernel.
        """
        if (seq_length, micro_batch_size) != (self.seq_length, self.micro_batch_size):
            raise ConfigurationError(
                f"A microbatch of {micro_batch_size} x {seq_length} tokens does not fit"
                " `tp_comm_overlap`, whose buffers were made for `micro_batch_size`"
                f" ({self.micro_batch_size}) x `seq_length` ({self.seq_length}) and serve training"
                " and evaluation alike; pad sequences, use batches that are multiples of"
                f" {self.micro_batch_size} samples (drop_last=True), or tp_comm_overlap=False."
            )


def plan_userbuffers(
    asked: TPCommOverlap,
    *,
    tp: int,
    cp: int,
    sequence_parallel: bool,
    precision: str,
    on_gpu: bool,
    te_version: tuple[int, ...] | None,
    gpus_per_nvlink_domain: int | None,
    seq_length: int | None,
    hidden_size: int | None,
    micro_batch_size: int | None,
) -> UserbuffersPlan:
    """Checks everything that is known before process groups exist, and says what to set up.

    Args:
        asked: The user's settings.
        tp: Tensor-parallel size.
        cp: Context-parallel size.
        sequence_parallel: Its effective value.
        precision: ``Trainer(precision=...)``.
        on_gpu: Whether the run is on CUDA devices.
        te_version: Release numbers of TransformerEngine; ``None`` if it is not installed.
        gpus_per_nvlink_domain: GPUs that reach each other through NVLink; ``None`` if unknown.
        seq_length: Tokens in a whole sequence; ``None`` if not told.
        hidden_size: Of the model; ``None`` if not told.
        micro_batch_size: Samples in a microbatch; ``None`` if it depends on the batch.

    Raises:
        ConfigurationError: On every rank alike.
    """
    missing = ([] if on_gpu else ["GPUs"]) + ([] if te_version else ["TransformerEngine"])
    if missing:
        raise ConfigurationError(
            f"`tp_comm_overlap` needs {' and '.join(missing)}, which this run does not have: it"
            " works through TransformerEngine's layers on CUDA devices; use"
            " lightning-mcore[te] on a machine with GPUs, or tp_comm_overlap=False."
        )
    if tp == 1:
        raise ConfigurationError(
            "`tp_comm_overlap` needs `tp` (1) of at least 2: one rank has nothing to send; use"
            " tp=2 or more, or tp_comm_overlap=False."
        )
    if not sequence_parallel:
        raise ConfigurationError(
            "`tp_comm_overlap` needs `sequence_parallel` (False): TransformerEngine switches every"
            " overlap off without it and says nothing; use sequence_parallel=True, or"
            " tp_comm_overlap=False."
        )
    if precision not in _PRECISIONS:
        raise ConfigurationError(
            f"`tp_comm_overlap` needs `precision` ({precision!r}) to be one of"
            f" {', '.join(_PRECISIONS)}: its buffers and kernels are made for two-byte bf16; use"
            " Trainer(precision='bf16-mixed'), or tp_comm_overlap=False."
        )
    # TransformerEngine forms its groups of tp neighbouring ranks.
    if gpus_per_nvlink_domain is not None and gpus_per_nvlink_domain % tp:
        raise ConfigurationError(
            f"`tp_comm_overlap` needs all {tp} ranks of a tensor-parallel group (`tp`) inside one"
            f" NVLink domain, which has {gpus_per_nvlink_domain} GPUs here; use a `tp` that divides"
            f" {gpus_per_nvlink_domain}, or tp_comm_overlap=False."
        )
    assert te_version is not None
    if asked.quantization == "fp8+none" and te_version < (2, 7):
        raise ConfigurationError(
            "`tp_comm_overlap` needs TransformerEngine 2.7 for `quantization` ('fp8+none'), and"
            f" {'.'.join(map(str, te_version))} is installed; use quantization='fp8' for a model"
            " without bf16 layers, or install a newer one."
        )
    for name, value, how in (
        ("seq_length", seq_length, "MCoreStrategy(seq_length=...)"),
        ("hidden_size", hidden_size, "model_dims = {'hidden_size': ...} on the LightningModule"),
        ("micro_batch_size", micro_batch_size, "MCoreStrategy(micro_batch_size=...)"),
    ):
        if value is None:
            raise ConfigurationError(
                f"`tp_comm_overlap` needs `{name}` (None): its buffers are made before the model is"
                f" built; use {how}, or tp_comm_overlap=False."
            )
    assert seq_length is not None
    assert micro_batch_size is not None
    assert hidden_size is not None
    _check_rows(asked, seq_length * micro_batch_size, tp=tp, cp=cp)
    modes: tuple[Literal["NONE", "FP8"], ...] = {
        "none": ("NONE",),
        "fp8": ("FP8",),
        "fp8+none": ("FP8", "NONE"),
    }[asked.quantization]  # type: ignore[assignment]
    table = {name: entry.entry(tp) for name, entry in asked.gemms.items()}
    return UserbuffersPlan(
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        shape=(seq_length * micro_batch_size // cp, hidden_size),
        tp=tp,
        quantization_modes=modes,
        ub_cfgs=(table, *(_without_dgrad_methods(table) for _ in modes[1:])),
        bootstrap_backend=asked.bootstrap_backend,
    )


def _without_dgrad_methods(table: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The table for a second mode.

    initialize_ub (2.20, pytorch/module/base.py) moves a non-bulk dgrad GEMM between its lists once
    per mode, and fails when it is not where it was ("list.remove(x): x not in list"). Without its
    method the entry is left where the first mode moved it.
    """
    return {
        name: {
            key: value
            for key, value in entry.items()
            if not (key == "method" and name in COLUMN_DGRAD and value != "bulk")
        }
        for name, entry in table.items()
    }


def _check_rows(asked: TPCommOverlap, tokens: int, *, tp: int, cp: int) -> None:
    if tokens % (cp * tp):
        raise ConfigurationError(
            f"`tp_comm_overlap` needs `seq_length` x `micro_batch_size` ({tokens}) to be a multiple"
            f" of `cp` ({cp}) x `tp` ({tp}) = {cp * tp}; use sequences padded to a multiple of"
            f" {cp * tp} tokens."
        )
    rows = tokens // cp
    # Chunks that do not come out even lose their last rows without an error.
    splits = dict.fromkeys(("proj_fprop", "fc2_fprop"), PIPELINE_SPLITS)
    for name, entry in asked.gemms.items():
        splits.pop(name, None)
        if entry.method == "pipeline":
            splits[name] = entry.num_splits or PIPELINE_SPLITS
        if entry.aggregate and tp % 2:
            raise ConfigurationError(
                f"`tp_comm_overlap` needs an even `tp` ({tp}) for `aggregate` (True) of `{name}`,"
                " which sends chunks in pairs; use aggregate=False."
            )
    for name, count in splits.items():
        uses = asked.reduce_scatter or name not in ("proj_fprop", "fc2_fprop")
        if uses and rows % (count * tp):
            raise ConfigurationError(
                f"`tp_comm_overlap` needs `seq_length` x `micro_batch_size` / `cp` ({rows}) to be a"
                f" multiple of `num_splits` ({count}) of `{name}` x `tp` ({tp}); use"
                " num_splits=1, or method='ring_exchange'."
            )


def check_quantization(asked: TPCommOverlap, *, fp8: bool, bf16_at_ends: bool) -> None:
    """Checks that the model computes in what the buffers were made for.

    Raises:
        ConfigurationError: TransformerEngine would find no buffer in the first forward pass.
    """
    actual = "none" if not fp8 else "fp8+none" if bf16_at_ends else "fp8"
    if actual != asked.quantization:
        raise ConfigurationError(
            f"`quantization` ({asked.quantization!r}) of `tp_comm_overlap` must be {actual!r}: the"
            f" model's config has fp8 {'on' if fp8 else 'off'} and first_last_layers_bf16"
            f" {'on' if bf16_at_ends else 'off'}; use TPCommOverlap(quantization={actual!r})."
        )


def userbuffers_fields(asked: TPCommOverlap | None) -> dict[str, Any]:
    """The fields of the engine's TransformerConfig that belong to userbuffers."""
    if asked is None:
        return {"tp_comm_overlap": False}
    return {
        "tp_comm_overlap": True,
        "tp_comm_overlap_ag": asked.all_gather,
        "tp_comm_overlap_rs": asked.reduce_scatter,
        "tp_comm_overlap_rs_dgrad": asked.rs_dgrad,
        "tp_comm_bulk_dgrad": asked.bulk_dgrad and not asked.rs_dgrad,
        "tp_comm_bulk_wgrad": asked.bulk_wgrad and not asked.rs_dgrad,
        "tp_comm_bootstrap_backend": asked.bootstrap_backend,
    }


def userbuffers_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables to set before userbuffers start.

    Where NVLink multicast is switched off for NCCL it must stay off for userbuffers too, which
    otherwise create multicast objects by themselves; with ``UB_SKIPMC`` they use CUDA IPC.
    """
    return {"UB_SKIPMC": "1"} if environment.get("NCCL_NVLS_ENABLE") == "0" else {}
