"""Checks that ranks which must draw the same batch do: one wrong sampler is silent otherwise."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_mcore.batch import tensors_of
from lightning_mcore.errors import ConfigurationError
from lightning_mcore.parallel_state import ParallelState


def check_same_batch(batch: Any, state: ParallelState) -> None:
    """Compares this batch within each copy of the model. Collective over the world, over gloo.

    It copies the batch to the host, so it is meant for the first batch only.

    Raises:
        ConfigurationError: On every rank, naming ranks that should hold the same batch.
    """
    layout = state.layout
    mine = torch.tensor([layout.dp_rank, fingerprint(batch)])
    gathered = [torch.empty_like(mine) for _ in range(layout.world_size)]
    dist.all_gather(gathered, mine, group=state.groups.world_cpu)
    first: dict[int, tuple[int, int]] = {}
    for rank, pair in enumerate(gathered):
        copy, print_ = int(pair[0]), int(pair[1])
        other, expected = first.setdefault(copy, (rank, print_))
        if print_ != expected:
            raise ConfigurationError(
                f"Ranks {other} and {rank} are tensor-, context- or pipeline-parallel peers and"
                " must draw the same batch, but drew different ones; leave"
                " Trainer(use_distributed_sampler=True), or build your own sampler with"
                " strategy.distributed_sampler_kwargs, let an IterableDataset take the part"
                " strategy.layout.dp_rank of strategy.layout.dp, and call"
                " lightning.seed_everything(...) if the data are drawn at random."
            )


def warn_of_own_state(checkpoint: Mapping[str, Any], state: ParallelState) -> None:
    """Warns of tensors that differ between ranks where only rank zero's are saved.

    A callback that keeps a moving average of its rank's parameters, for example, would get those of
    rank zero back. Collective over the world, over gloo.

    Args:
        checkpoint: Lightning's dict, with what callbacks and ``on_save_checkpoint`` put there.
        state: Groups.
    """
    elsewhere = ("callbacks", "loops", "state_dict", "optimizer_states")
    entries = {key: value for key, value in checkpoint.items() if key not in elsewhere}
    entries |= {f"callback {key}": v for key, v in (checkpoint.get("callbacks") or {}).items()}
    mine = {key: fingerprint(value) for key, value in entries.items()}
    gathered: list[Any] = [None] * state.layout.world_size
    dist.all_gather_object(gathered, mine, group=state.groups.world_cpu)
    differing = sorted(
        key for key in mine if any(other.get(key) != mine[key] for other in gathered)
    )
    if differing:
        rank_zero_warn(
            f"Of {differing}, ranks hold different tensors, but a checkpoint keeps those of rank 0,"
            " and all ranks get them back; gather what belongs to one rank, or keep it in the"
            " model, of which every rank saves its part."
        )


def fingerprint(batch: Any) -> int:
    """A 32-bit checksum of all tensors of a batch, with their shapes and dtypes."""
    value = 0
    for tensor in tensors_of(batch):
        value = zlib.crc32(repr((tuple(tensor.shape), tensor.dtype)).encode(), value)
        value = zlib.crc32(_bytes(tensor), value)
    return value


def _bytes(tensor: Tensor) -> bytes:
    host = tensor.detach().cpu().contiguous().reshape(-1)
    return host.view(torch.uint8).numpy().tobytes() if host.numel() else b""
