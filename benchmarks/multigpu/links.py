"""The links: topology, peer access, and the bus bandwidth of collectives by size."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mcore.timeline.bandwidth import bus_bytes
from lightning_mcore.topology_probe import read_hardware

SIZES = (8, 2**20, 2**24, 2**28, 2**30)
"""Bytes, as nccl-tests count them: the input of an all-reduce, the output of an all-gather, the
input of a reduce-scatter, what a rank sends in the others."""
_OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "send_recv", "all_to_all")


def measure_links(accelerator: str, largest: int) -> dict[str, Any]:
    """Topology and bandwidths; every rank of a team calls it.

    Returns:
        On rank 0 everything, on others only their own peer access.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    on_gpu = accelerator == "gpu"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        options: dict[str, Any] = {"device_id": device} if on_gpu else {}
        dist.init_process_group("nccl" if on_gpu else "gloo", **options)
    found: dict[str, Any] = {"peer_access": _peers(rank, world) if on_gpu else {}}
    if rank == 0:
        hardware = read_hardware(os.environ)
        found["gpus"] = [f"{gpu.name}, {gpu.nvlinks} NVLinks" for gpu in hardware.gpus]
        found["links"] = [list(row) for row in hardware.links]
        found["driver"], found["cuda"] = hardware.driver, hardware.cuda
        found["notes"] = list(hardware.notes)
        if on_gpu:
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    rows = []
    for operation in _OPERATIONS:
        for size in (size for size in SIZES if size <= largest):
            rows.append(_measure(operation, size, world, rank, device))
            torch.cuda.empty_cache()
    if rank == 0:
        found["rows"] = rows
    return found


def _peers(rank: int, world: int) -> dict[int, bool]:
    return {
        other: bool(torch.cuda.can_device_access_peer(rank, other))
        for other in range(world)
        if other != rank
    }


def _measure(
    operation: str, size: int, world: int, rank: int, device: torch.device
) -> dict[str, Any]:
    """Bandwidth of one operation: the mean of many calls in a row, as in nccl-tests."""
    elements = max(world, size // 2 // world * world)
    call = _calls(operation, elements, world, rank, device)
    for _ in range(3):
        call()
    _settle(device)
    # About 0.1 s of the largest, more calls of small ones.
    repeats = max(5, min(50, 2**31 // max(size, 1)))
    begin, begin_s = _event(device), time.perf_counter()
    for _ in range(repeats):
        call()
    end = _event(device)
    _settle(device)
    seconds = (
        begin.elapsed_time(end) / 1e3 if begin is not None else time.perf_counter() - begin_s
    ) / repeats
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    seconds = float(slowest)
    count = 2 * elements
    return {
        "operation": operation,
        "bytes": count,
        "us": seconds * 1e6,
        "algbw_gbps": count / seconds / 1e9,
        "busbw_gbps": bus_bytes(operation, count, world) / seconds / 1e9,
    }


def _calls(
    operation: str, elements: int, world: int, rank: int, device: torch.device
) -> Callable[[], None]:
    def tensor(count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.bfloat16, device=device)

    if operation == "all_reduce":
        both = tensor(elements)
        return lambda: dist.all_reduce(both)
    if operation == "all_gather":
        part, whole = tensor(elements // world), tensor(elements)
        return lambda: dist.all_gather_into_tensor(whole, part)
    if operation == "reduce_scatter":
        part, whole = tensor(elements // world), tensor(elements)
        return lambda: dist.reduce_scatter_tensor(part, whole)
    mine, theirs = tensor(elements), tensor(elements)
    if operation == "all_to_all":
        return lambda: dist.all_to_all_single(theirs, mine)

    def exchange() -> None:
        # A ring: every rank sends to the next and receives from the one before.
        pair = [
            dist.P2POp(dist.isend, mine, (rank + 1) % world),
            dist.P2POp(dist.irecv, theirs, (rank - 1) % world),
        ]
        for work in dist.batch_isend_irecv(pair):
            work.wait()

    return exchange


def _event(device: torch.device) -> Any:
    if device.type == "cpu":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _settle(device: torch.device) -> None:
    if device.type != "cpu":
        torch.cuda.synchronize()
    dist.barrier()
    if device.type != "cpu":
        torch.cuda.synchronize()
