"""How many ranks the GPUs of this machine can take, and marks that skip tests of more.

``RANKS_PER_GPU=2`` lets two ranks share each GPU, so that tests of two GPUs run on one, and with 4
tests of four (CONTRIBUTING.md says how). They show that the code works, not how fast.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from lightning.fabric.accelerators import cuda as fabric_cuda
from lightning.pytorch.accelerators import CUDAAccelerator

PER_GPU = int(os.environ.get("RANKS_PER_GPU", "1"))
GPUS = torch.cuda.device_count()
RANKS = PER_GPU * GPUS
HAS_TE = find_spec("transformer_engine") is not None


def needs_gpus(count: int, *, te: bool = True, own: bool = False) -> Any:
    """A mark that skips without so many GPUs, or ranks on them.

    Args:
        count: Of GPUs.
        te: Whether TransformerEngine is needed.
        own: Whether ranks must not share a GPU.
    """
    shared = own and PER_GPU > 1
    reason = f"needs {count} GPUs (here: {GPUS}"
    reason += f", with {PER_GPU} ranks each)" if PER_GPU > 1 else ")"
    if shared:
        reason += ", a rank on each"
    if te:
        reason += f" and TransformerEngine (here: {HAS_TE})"
    missing = count > RANKS or shared or (te and not HAS_TE)
    return pytest.mark.skipif(missing, reason=reason)


def _devices_in_turn(devices: list[int]) -> list[torch.device]:
    return [torch.device("cuda", index // PER_GPU) for index in devices]


if PER_GPU > 1:
    # In every rank: each imports this module with the function that it runs.
    fabric_cuda.num_cuda_devices = lambda: RANKS
    CUDAAccelerator.get_parallel_devices = staticmethod(_devices_in_turn)
