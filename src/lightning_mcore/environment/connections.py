"""``CUDA_DEVICE_MAX_CONNECTIONS``: the value a run wants, and what is wrong with another one."""

from __future__ import annotations

from lightning_mcore.environment.values import CONNECTIONS, Noted, Uses

__all__ = ["check_connections", "wanted_connections"]

_MANY = "32"
"""The most connections that CUDA takes, and what recipes for concurrent streams use."""

_BEFORE_BLACKWELL = ("ampere", "hopper")


def wanted_connections(uses: Uses) -> tuple[str, str] | None:
    """Value and reason; the order of the rules is that of what breaks most without them."""
    if uses.overlaps_experts:
        return _MANY, "the experts' all-to-all overlaps only if it has queues of its own"
    if uses.arch == "blackwell":
        return (_MANY, "recipes for Blackwell") if uses.world_size > 1 else None
    if uses.splits_layers and uses.arch in _BEFORE_BLACKWELL:
        return (
            "1",
            "before Blackwell, tensor- and context-parallel communication starts reliably before"
            " the GEMM that hides it only if launches keep one order",
        )
    if uses.dispatcher in ("deepep", "hybridep"):
        return _MANY, f"{uses.dispatcher} runs on streams of its own"
    return None


def check_connections(uses: Uses, found: Noted) -> None:
    """Notes what is wrong with the value that is set, if any."""
    value = found.environ.get(CONNECTIONS)
    one = value is not None and value.strip() == "1"
    wanted = wanted_connections(uses)
    text = f"`{CONNECTIONS}` ({value})"
    if value is not None and not (value.strip().isdigit() and 1 <= int(value) <= 32):
        found.note(
            "warning",
            "env-connections-range",
            f"{text} is not a number from 1 to 32, which CUDA takes",
            f"set it to {wanted[0]}" if wanted else "unset it",
            CONNECTIONS,
        )
    elif one and uses.overlaps_experts:
        found.note(
            "warning",
            "env-connections-experts",
            f"{text} puts the experts' all-to-all and the compute that shall hide it in one queue",
            f"set it to {_MANY}",
            CONNECTIONS,
        )
    elif value is not None and not one and wanted is not None and wanted[0] == "1":
        # megatron/training/arguments.py asserts 1 here; the core's layers only warn.
        found.note(
            "warning",
            "env-connections-tp",
            f"{text} lets tensor- and context-parallel communication start after the GEMM that"
            f" shall hide it on {uses.arch.capitalize()}",
            "set it to 1",
            CONNECTIONS,
        )
    elif one and uses.overlaps_data_parallel and uses.arch in _BEFORE_BLACKWELL:
        # NVIDIA/Megatron-LM#1468.
        needed = wanted is not None and wanted[0] == "1"
        found.note(
            "info" if needed else "warning",
            "env-connections-dp",
            f"{text} makes the overlap of data-parallel communication depend on the order of"
            " launches, and may hide nothing of it",
            "look at the measured overlap; tensor and context parallelism want 1 all the same"
            if needed
            else "unset it",
            CONNECTIONS,
        )
    both = uses.overlaps_experts and uses.splits_layers and uses.arch in _BEFORE_BLACKWELL
    if both and not one:
        found.note(
            "info",
            "env-connections-both",
            f"`{CONNECTIONS}` cannot suit both: tensor and context parallelism want 1 before"
            f" Blackwell, the experts' overlap wants {_MANY}",
            f"measure 1 against {_MANY}, or use tp=1 and cp=1",
            CONNECTIONS,
        )
