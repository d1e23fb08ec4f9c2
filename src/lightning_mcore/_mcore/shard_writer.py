"""Writes shards to files in three parts: plan together, write alone, finish on one rank.

Files are the engine's ``torch_dist`` format, planned and written by torch's own distributed
checkpoint. Its ``save`` runs all three in one collective call; taken apart, the long one in the
middle needs no other rank and can run beside the training.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.exchange_utils import (
    determine_main_replica_uniform_distribution,
)
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    distribute_main_replicas_with_precomputed_distribution,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.validation import validate_sharding_integrity
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from lightning_mcore.errors import CheckpointError

Tree = dict[str, Any]


@dataclass(slots=True)
class PlannedWrite:
    """What this rank is to write, and on rank 0 the index of what all ranks write."""

    _writer: FileSystemWriter
    _planner: MCoreSavePlanner | None
    """Holds the tensors until they are written."""
    _plan: SavePlan
    _index: Metadata | None

    def run(self) -> list[WriteResult]:
        """Writes this rank's files, once; needs no other rank and no process group.

        Returns:
            Where everything lies, to be given to ``finish``.
        """
        assert self._planner is not None, "each rank writes once"
        planner, self._planner = self._planner, None
        written = self._writer.write_data(self._plan, planner)
        written.wait()
        return written.value()

    def finish(self, results: list[list[WriteResult]]) -> None:
        """Writes the index. On rank 0, when all ranks have written."""
        assert self._index is not None, "rank 0 has the index"
        self._writer.finish(self._index, results)


def plan_write(
    directory: Path,
    sharded: Tree,
    *,
    copy: bool,
    dp_cp: dist.ProcessGroup,
    world_cpu: dist.ProcessGroup,
) -> PlannedWrite:
    """Decides which rank writes what: each shard once, spread evenly over ``dp_cp``.

    Collective over the world.

    Args:
        directory: To write to.
        sharded: Shards of this rank, from ``checkpointing.build``.
        copy: Whether to copy to the host what this rank is to write, so that it stays as it is
            while training goes on.
        dp_cp: Ranks that hold copies of the same shards.
        world_cpu: All ranks, over gloo.

    Raises:
        CheckpointError: On every rank, if shards are missing or overlap, or a rank cannot plan.
    """
    _check_complete(sharded, world_cpu)
    share = determine_main_replica_uniform_distribution(sharded, dp_cp)
    distribute_main_replicas_with_precomputed_distribution(sharded, dp_cp, share)
    by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
    main = dist.get_rank() == 0
    # Copies are on the host: overlapping copies from the device, in a stream that the writing
    # thread would create on the wrong device, have no purpose.
    options: dict[str, Any] = {"per_thread_copy_ahead": 0} if copy else {}
    writer = FileSystemWriter(directory, **options)
    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    mine: SavePlan | str
    try:
        if copy:
            _copy_to_host(by_key)
        with _without_torch_notices():
            planner.set_up_planner(
                state_dict=mcore_to_pyt_state_dict(by_key, is_loading=False),
                storage_meta=writer.storage_meta(),
                is_coordinator=main,
            )
            writer.set_up_storage_writer(main)
            mine = writer.prepare_local_plan(planner.create_local_plan())
    except Exception as error:
        mine = f"rank {dist.get_rank()}: {type(error).__name__}: {error}"
    plan, index = _exchange_plans(mine, planner, writer, world_cpu)
    return PlannedWrite(writer, planner, planner.finish_plan(plan), index)


def _copy_to_host(by_key: dict[str, list[Any]]) -> None:
    """Replaces the data of shards by copies; objects are serialized by the engine right after."""
    for shards in by_key.values():
        for shard in shards:
            if isinstance(shard, ShardedTensor):
                shard.data = shard.data.detach().to("cpu", copy=True)


def _exchange_plans(
    mine: SavePlan | str,
    planner: MCoreSavePlanner,
    writer: FileSystemWriter,
    world_cpu: dist.ProcessGroup,
) -> tuple[SavePlan, Metadata | None]:
    """Completes this rank's plan by what rank 0 knows of all of them."""
    size = dist.get_world_size(world_cpu)
    main = dist.get_rank() == 0
    plans: list[Any] = [None] * size
    dist.gather_object(mine, plans if main else None, dst=0, group=world_cpu)
    answers: list[Any] = []
    index: Metadata | None = None
    if main:
        try:
            failed = [plan for plan in plans if isinstance(plan, str)]
            if failed:
                raise CheckpointError("; ".join(failed))
            answers, index = planner.create_global_plan(plans)
            answers = writer.prepare_global_plan(answers)
        except Exception as error:
            answers = [str(error)] * size
    answer: list[Any] = [None]
    dist.scatter_object_list(answer, answers if main else None, src=0, group=world_cpu)
    if isinstance(answer[0], str):
        raise CheckpointError(answer[0])
    return answer[0], index


def _check_complete(sharded: Tree, world_cpu: dist.ProcessGroup) -> None:
    """Checks that the main replicas of all ranks cover every tensor exactly once.

    The engine's own check raises on rank 0 only, where the others would wait for it for ever. It
    leaves tensors without a regular grid to torch, which checks them in its global plan.
    """
    shards: list[Any] = [None] * dist.get_world_size(world_cpu)
    local = [leaf.without_data() for leaf in nested_values(sharded)]
    dist.all_gather_object(shards, local, group=world_cpu)
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            validate_sharding_integrity(shards)
        except Exception as error:
            box[0] = str(error)
    dist.broadcast_object_list(box, 0, group=world_cpu)
    if box[0] is not None:
        raise CheckpointError(f"the shards of all ranks do not make up the model: {box[0]}")


@contextlib.contextmanager
def _without_torch_notices() -> Iterator[None]:
    """Hides torch's notices to the engine about names that will go."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield
