"""Logs how much memory ranks use, and which uses most.

What enters: the allocator's counters. What leaves: values over all ranks. Every rank calls it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil
import torch
from typing_extensions import override

from lightning_mcore.callbacks._periodic import PeriodicCallback
from lightning_mcore.callbacks._ranks import gather_objects, log_now

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["MemoryStats"]

_GIB = 2**30


class MemoryStats(PeriodicCallback):
    """Logs memory every ``every_n_steps`` optimizer steps, in GiB, the same on all ranks.

    * On GPUs ``memory/allocated_gib`` (tensors now), ``memory/reserved_gib`` (held from the device)
      and ``memory/peak_gib`` (most tensors at once since the last time), each the maximum over
      ranks; ``memory/retries``, the sum of allocations that had to wait for freed memory since the
      start: where it grows, a rank is about to run out.
    * On CPU ``memory/rss_gib``: resident memory of the fullest rank's process.
    * ``memory/fullest_rank``: the rank with the largest peak (or resident) memory.

    ``per_rank=True`` adds ``memory/peak_gib/rank_R`` (``memory/rss_gib/rank_R``).

    Cost: in the steps that log, some 0.1 ms for reading the allocator's counters and one gather
    over gloo; no wait for the device. In others nothing but a comparison.

    Args:
        every_n_steps: Optimizer steps between values.
        per_rank: Whether to log each rank's peak too.

    Raises:
        ConfigurationError: If ``every_n_steps`` is less than 1.
    """

    def __init__(self, every_n_steps: int = 50, *, per_rank: bool = False) -> None:
        super().__init__(every_n_steps)
        self.per_rank = per_rank

    @override
    def _at_step(self, trainer: Trainer, pl_module: LightningModule) -> None:
        device = trainer.strategy.root_device
        of_ranks = gather_objects(trainer, _read(device))
        largest = "peak_gib" if device.type == "cuda" else "rss_gib"
        values = {
            f"memory/{name}": max(found[name] for found in of_ranks)
            for name in of_ranks[0]
            if name != "retries"
        }
        if "retries" in of_ranks[0]:
            values["memory/retries"] = sum(found["retries"] for found in of_ranks)
        fullest = max(range(len(of_ranks)), key=lambda rank: of_ranks[rank][largest])
        values["memory/fullest_rank"] = float(fullest)
        if self.per_rank:
            values.update(
                (f"memory/{largest}/rank_{rank}", found[largest])
                for rank, found in enumerate(of_ranks)
            )
        log_now(trainer, values)


def _read(device: torch.device) -> dict[str, float]:
    if device.type != "cuda":
        return {"rss_gib": psutil.Process().memory_info().rss / _GIB}
    stats = torch.cuda.memory_stats(device)
    torch.cuda.reset_peak_memory_stats(device)
    return {
        "allocated_gib": stats.get("allocated_bytes.all.current", 0) / _GIB,
        "reserved_gib": stats.get("reserved_bytes.all.current", 0) / _GIB,
        "peak_gib": stats.get("allocated_bytes.all.peak", 0) / _GIB,
        "retries": float(stats.get("num_alloc_retries", 0)),
    }
