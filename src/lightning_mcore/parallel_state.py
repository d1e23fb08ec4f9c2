"""Process groups of a run: created once the layout is known, handed on as values.

Enters: a layout and an initialised world group. Leaves: a frozen ``ParallelState``. Every rank
calls every function here.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Any
from weakref import WeakMethod

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from lightning_mcore._mcore import groups as engine_groups
from lightning_mcore._mcore.chained import is_expert
from lightning_mcore.layout import Layout

_SEED_STRIDE_PER_STAGE = 100
"""Distance between the random streams of pipeline stages; Megatron-LM's own choice
(megatron/training/initialize.py, _set_random_seed)."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Process groups of this rank. Collectives over them are the caller's responsibility."""

    tp: dist.ProcessGroup
    """Tensor parallel: ranks that hold shards of the same layers."""
    pp: dist.ProcessGroup
    """Pipeline: ranks that hold consecutive stages."""
    cp: dist.ProcessGroup
    """Context parallel: ranks that hold parts of the same sequences."""
    dp: dist.ProcessGroup
    """Data parallel: ranks with the same weights and different samples."""
    dp_cp: dist.ProcessGroup
    """Data and context parallel together: the group that reduces gradients."""
    ep: dist.ProcessGroup
    """Expert parallel: ranks that hold different experts."""
    mp: dist.ProcessGroup
    """Tensor and pipeline parallel together: one copy of the model."""
    world_cpu: dist.ProcessGroup
    """All ranks, over gloo: for decisions on the host that must not wait for the device."""


@dataclass(frozen=True, slots=True)
class ParallelState:
    """Layout and groups of a run."""

    layout: Layout
    groups: Groups
    seed: int
    """Base of all random streams, the same on every rank."""
    graph_safe_rng: bool = False
    """Whether CUDA graphs may draw from the engine's random streams."""


def init_parallel_state(
    layout: Layout,
    *,
    device: torch.device,
    timeout_s: float,
    batched_p2p: bool,
    fields: Mapping[str, Any] = MappingProxyType({}),
    communicators: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    graph_safe_rng: bool = False,
    on_end: Callable[[], None] | None = None,
) -> ParallelState:
    """Creates the engine's groups, warms up the pipeline's connections and seeds random streams.

    Collective over the world.

    Args:
        layout: Sizes.
        device: Of this rank.
        timeout_s: Seconds after which a collective fails.
        batched_p2p: Whether all transfers of a pipeline run in batches.
        fields: Further arguments of the engine's ``initialize_model_parallel``.
        communicators: NCCL settings by group.
        graph_safe_rng: Whether CUDA graphs are to draw from the engine's random streams.
        on_end: A method of an object that uses the groups, called before they are destroyed. The
            object is not kept alive for it.
    """
    _destroy_live(graceful=True)
    engine_groups.init_parallel_state(
        layout,
        timeout_minutes=max(1, round(timeout_s / 60)),
        fields=fields,
        communicators=communicators,
    )
    world_cpu = (
        dist.group.WORLD
        if dist.get_backend() == "gloo"
        else dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    )
    assert world_cpu is not None
    groups = Groups(**engine_groups.engine_groups(), world_cpu=world_cpu)
    if layout.pp > 1:
        _warm_up_pipeline(groups.pp, device, batched=batched_p2p)
    seed = _agree_on_seed(layout, world_cpu)
    state = ParallelState(layout, groups, seed, graph_safe_rng)
    _live.append((state, None if on_end is None else WeakMethod(on_end)))
    return state


def destroy_parallel_state(state: ParallelState, *, graceful: bool) -> None:
    """Destroys the model-parallel groups. The world group stays, as with Lightning's strategies.

    Args:
        state: What ``init_parallel_state`` gave.
        graceful: Whether to release communicators, which waits for other ranks; not after an error,
            when others may be stuck in a collective.
    """
    if any(live is state for live, _ in _live):
        _destroy_live(graceful=graceful)


_live: list[tuple[ParallelState, WeakMethod[Callable[[], None]] | None]] = []
"""The one state that exists in this process, as the engine has room for only one; and whom to tell
of its end."""


def _destroy_live(*, graceful: bool) -> None:
    groups: list[dist.ProcessGroup] = []
    while _live:
        state, on_end = _live.pop()
        groups.append(state.groups.world_cpu)
        if on_end is not None:
            _call(on_end)
    if engine_groups.parallel_state_exists():
        groups += engine_groups.all_groups()
        engine_groups.destroy_parallel_state()
    if graceful and dist.is_initialized():
        for group in groups:
            if group is not dist.group.WORLD:
                # A group that is not known any more has been destroyed by the engine or by others.
                with suppress(ValueError):
                    dist.destroy_process_group(group)
    if groups:
        # Chunks and groups refer to each other; until collected they keep gloo's threads alive.
        gc.collect()


def _call(method: WeakMethod[Callable[[], None]]) -> None:
    """Calls a method if its object lives; a name for it elsewhere would save it from collection."""
    call = method()
    if call is not None:
        call()


def seed_stage(state: ParallelState, stage_index: int | None = None) -> None:
    """Seeds the engine's random streams for building a stage, or (``None``) for running.

    The stream of the host's default generator, from which users draw data, is left where it was.
    """
    host = torch.get_rng_state()
    offset = state.layout.pp_rank if stage_index is None else 1 + stage_index
    engine_groups.seed_parallel_rng(
        state.seed + _SEED_STRIDE_PER_STAGE * offset, graph_safe=state.graph_safe_rng
    )
    torch.set_rng_state(host)


def _agree_on_seed(layout: Layout, world_cpu: dist.ProcessGroup) -> int:
    """The run's seed: Lightning's global one, else rank zero's choice.

    Without a global seed the host's generators are set too: the same within a copy of the model,
    whose ranks must draw the same data, and different between copies.
    """
    given = os.environ.get("PL_GLOBAL_SEED")
    if given is not None:
        return int(given)
    chosen = torch.tensor([torch.initial_seed() % 2**31], dtype=torch.int64)
    dist.broadcast(chosen, 0, group=world_cpu)
    seed = int(chosen)
    copy_seed = (seed + layout.dp_rank) % 2**31
    torch.manual_seed(copy_seed)
    random.seed(copy_seed)
    np.random.seed(copy_seed)
    return seed


def _warm_up_pipeline(group: dist.ProcessGroup, device: torch.device, *, batched: bool) -> None:
    """Opens every connection between neighbouring stages in one fixed order.

    Batched P2P uses the communicator of the whole group, which all stages must open together.

    Unbatched P2P creates a communicator of two ranks at first use; when stages first meet in
    different orders, NCCL deadlocks (NVIDIA/Megatron-LM#5240). With two stages the engine uses the
    world group for one direction (pipeline_parallel/p2p_communication.py, _p2p_ops), so that one is
    opened too.
    """
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    if batched:
        return
    ranks = dist.get_process_group_ranks(group)
    me = dist.get_rank()
    world = dist.group.WORLD
    for over in [group, world] if len(ranks) == 2 else [group]:
        for position, source in enumerate(ranks):
            target = ranks[(position + 1) % len(ranks)]
            token = torch.zeros(1, device=device)
            if me == source:
                dist.send(token, target, group=over)
            elif me == target:
                dist.recv(token, source, group=over)


def count_parameters(chunks: Sequence[nn.Module], state: ParallelState) -> tuple[int, int]:
    """Parameters of the whole model, each counted once, and of the fullest rank.

    Collective over the world, over gloo.
    """
    layout = state.layout
    mine = total = 0
    for chunk in chunks:
        for param in chunk.parameters():
            mine += param.numel()
            split = bool(getattr(param, "tensor_model_parallel", False))
            if is_expert(param):  # whose copies lie on another grid
                first_copy = layout.edp_rank == 0
                split = split or layout.rank % layout.etp == 0
            else:
                first_copy = layout.dp_rank == layout.cp_rank == 0
                split = split or layout.tp_rank == 0
            # A tied output layer is a second copy of the first stage's embedding.
            tied_copy = getattr(param, "shared", False) and not layout.is_first_stage
            if first_copy and split and not tied_copy:
                total += param.numel()
    summed = torch.tensor([total])
    largest = torch.tensor([mine])
    dist.all_reduce(summed, group=state.groups.world_cpu)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=state.groups.world_cpu)
    return int(summed), int(largest)
