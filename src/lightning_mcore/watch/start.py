"""Brings the monitors of all ranks together."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from lightning_mcore.watch.hub import Hub
from lightning_mcore.watch.monitor import Monitor
from lightning_mcore.watch.progress import Progress


def start_monitor(
    address: str,
    *,
    where: str,
    progress: Progress,
    groups: Mapping[str, Any],
    lost_after_s: float,
    hang_after_s: float,
    is_running: Callable[[int], bool],
    print_at_once: bool,
) -> Monitor | None:
    """Starts this rank's monitor, and on rank 0 the hub. Collective over the world, over gloo.

    Args:
        address: Of rank 0's host.
        where: This rank's coordinates, in words.
        progress: Written by the main thread.
        groups: This rank's process groups by name, with ``world_cpu`` among them.
        lost_after_s: Silence after which a rank counts as lost.
        hang_after_s: Time without progress after which the run is taken to hang.
        is_running: Whether a thread is still inside the Trainer.
        print_at_once: Whether a launcher may kill this process before its exception is shown.

    Returns:
        The monitor, or ``None`` where there is one rank only, or rank 0 cannot be reached besides
        the process groups (a firewall); collectives then end by their own timeout.
    """
    if dist.get_world_size() == 1:
        return None
    rank = dist.get_rank()
    hub: Hub | None = None
    box: list[tuple[int, str, str] | None] = [None]
    if rank == 0:
        token = secrets.token_hex(16)
        with suppress(OSError):
            hub = Hub(address, token, lost_after_s, progress.status)
            hub.start()
            box = [(hub.port, token, where)]
    dist.broadcast_object_list(box, 0, group=groups["world_cpu"])
    if box[0] is None:
        return None
    monitor = None
    with suppress(OSError):
        monitor = Monitor(
            address,
            *box[0],
            rank=rank,
            where=where,
            progress=progress,
            groups=groups,
            lost_after_s=lost_after_s,
            hang_after_s=hang_after_s,
            is_running=is_running,
            print_at_once=print_at_once,
            hub=hub,
        )
        monitor.start()
    return monitor
