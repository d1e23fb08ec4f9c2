"""Algorithmic and bus bandwidth as nccl-tests define them.

Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md. With S bytes, n ranks
and t seconds, algorithmic bandwidth is S / t, and bus bandwidth is that times a factor which makes
it comparable to the speed of a link whatever n is. S is what one rank ends with or starts from,
whichever is larger: the buffer of an all-reduce, the gathered output of an all-gather, the input of
a reduce-scatter or all-to-all, the message of a send.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["BUS_FACTORS", "bus_bytes"]

BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
    "send_recv": lambda n: 1.0,
    "copy": lambda n: 1.0,
}
"""Factor by collective and number of ranks; ``copy`` is a peer-to-peer copy."""


def bus_bytes(collective: str | None, size: int | None, group_size: int | None) -> float | None:
    """Bytes times the bus factor; ``None`` where the size or the collective is not known."""
    if size is None or collective not in BUS_FACTORS:
        return None
    if group_size is None and collective not in ("broadcast", "reduce", "send_recv", "copy"):
        return None
    return size * BUS_FACTORS[collective](group_size or 2)
