"""What a process of a benchmark sets before it becomes a rank."""

from __future__ import annotations

import logging
import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def become_rank(rank: int, world: int, port: int) -> None:
    """Sets what a launcher would, so that Lightning takes this process as started from outside."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        NODE_RANK="0",
        WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )


def be_quiet(level: int = logging.ERROR) -> None:
    """Hides warnings, and what Lightning and the strategy say below ``level``."""
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_utilities", "lightning_mcore"):
        logging.getLogger(name).setLevel(level)


@contextmanager
def process_group(accelerator: str) -> Iterator[Any]:
    """The device of this rank, within the default process group; on CPU in the engine's adapter."""
    import torch
    import torch.distributed as dist

    if accelerator == "gpu":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl")
        yield device
    else:
        from lightning_mcore._mcore.cpu import CpuAdapter

        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        with CpuAdapter():
            yield torch.device("cpu")
    dist.destroy_process_group()


def without_room_for_frames() -> None:
    """Takes from the strategy what it does about Python's frames (lightning_mcore/frames.py)."""
    from lightning_mcore.optimizer import EngineOptimizer
    from lightning_mcore.schedule import StepRunner

    for owner, name in ((StepRunner, "_run"), (EngineOptimizer, "step")):
        setattr(owner, name, getattr(owner, name).__wrapped__)
