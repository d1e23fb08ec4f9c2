"""How the processes of a run start and talk: the part of the strategy that knows no model."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from typing_extensions import override

from lightning_mcore import _launchers, _lightning
from lightning_mcore.errors import NotInitializedError
from lightning_mcore.layout import Layout
from lightning_mcore.nonfinite import coordinates
from lightning_mcore.parallel_state import Groups, ParallelState
from lightning_mcore.step_log import ALREADY_REDUCED
from lightning_mcore.watch.monitor import Monitor
from lightning_mcore.watch.progress import Progress
from lightning_mcore.watch.stacks import is_inside
from lightning_mcore.watch.start import start_monitor

MARGIN_S = 60.0
"""By how much collectives may outlast ``timeout_s``: the watchdog has more to say than they."""

LEAVE_S = 30.0
"""More than a monitor needs to learn of a failure, tell of it, and make its process leave."""


class LayoutStrategy(ParallelStrategy):
    """Launches one process per device; collectives run over the layout's data-parallel axis.

    Model-parallel peers hold copies of what users log or gather, so a reduction over the world
    would count them several times.
    """

    def __init__(
        self, process_group_backend: str | None, timeout_s: float, peer_timeout_s: float
    ) -> None:
        super().__init__()
        self._backend = process_group_backend
        self._timeout_s = timeout_s
        self._peer_timeout_s = peer_timeout_s
        self._progress = Progress()
        self._monitor: Monitor | None = None
        self._state: ParallelState | None = None
        self.num_nodes = 1

    @property
    def layout(self) -> Layout:
        """Sizes and this rank's coordinates."""
        raise NotImplementedError

    @property
    def groups(self) -> Groups:
        """Process groups of this rank, for collectives of your own."""
        return self._parallel_state.groups

    @property
    def _parallel_state(self) -> ParallelState:
        if self._state is None:
            raise NotInitializedError(
                "Process groups exist from the Trainer's start, for use in configure_model, until"
                " another Trainer of this process starts."
            )
        return self._state

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning injects samplers and honours ``sync_dist``: not for one process."""
        return self.num_processes * self.num_nodes > 1

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Ranks on this node."""
        return len(self.parallel_devices or ())

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.layout.dp, "rank": self.layout.dp_rank}

    @property
    def process_group_backend(self) -> str | None:
        """Backend of the world group."""
        return self._backend

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if self.cluster_environment.creates_processes_externally:
            self._launcher = _launchers.present_launcher(self._run_watched)
        else:
            self._launcher = _launchers.subprocess_launcher(
                self.cluster_environment,
                self.num_processes,
                self.num_nodes,
                around=self._run_watched,
                variables=self._launch_variables,
                patience_s=self._patience_s,
            )

    def _launch_variables(self) -> Mapping[str, str]:
        """Environment variables for the processes that Lightning starts, where they are unset."""
        return {}

    def _patience_s(self) -> float:
        """For how long since the failure of another rank this process may go on."""
        if self._progress.is_finishing:
            return math.inf
        return LEAVE_S if self._monitor is not None and self._monitor.is_alive() else 0.0

    def _run_watched(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs a Trainer's entry point; an error becomes that of the rank which caused it."""
        try:
            return self._run_until_signal(function, *args, **kwargs)
        except SIGTERMException:
            # All ranks agreed on it; it is nobody's failure.
            raise
        except BaseException as error:
            found = error if self._monitor is None else self._monitor.judge(error)
            if found is error:
                raise
            # Of a failed collective there is nothing to see but where this rank waited.
            raise found from None

    def _run_until_signal(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except SIGTERMException:
            self._save_before_exit()
            raise

    def _save_before_exit(self) -> None:
        """Called on all ranks when they stop for a signal."""

    def _start_monitor(self, state: ParallelState) -> None:
        """Starts watching other ranks. Collective over the world."""
        assert self.cluster_environment is not None
        self._progress = Progress()
        self._monitor = start_monitor(
            self.cluster_environment.main_address,
            where=f"{coordinates(state)}; host {socket.gethostname()}, process {os.getpid()}",
            progress=self._progress,
            groups={name: getattr(state.groups, name) for name in state.groups.__slots__},
            lost_after_s=self._peer_timeout_s,
            hang_after_s=self._timeout_s,
            is_running=partial(is_inside, function=_lightning.ENTRY_POINT),
            print_at_once=_launchers.has_children(self._launcher),
        )

    def _stop_monitor(self) -> None:
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None

    def set_world_ranks(self) -> None:
        """Tells the cluster environment this process's place (called by Lightning)."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(
                self.node_rank * self.num_processes + self.local_rank
            )
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        _lightning.set_rank_zero(self.global_rank)

    def _init_world(self) -> None:
        """Creates the default process group. Every rank calls it."""
        assert self.cluster_environment is not None
        self._backend = _lightning.init_world(
            self.cluster_environment,
            self.root_device,
            self._backend,
            self._timeout_s + MARGIN_S,
        )

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces over data parallel unless told otherwise: model-parallel peers hold copies."""
        if not isinstance(tensor, Tensor) or group is ALREADY_REDUCED:
            return tensor
        return _reduce(tensor, group or self.groups.dp_cp, reduce_op)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks (or any) decided so; over the world, on the host."""
        votes = torch.tensor(int(decision))
        dist.all_reduce(votes, group=self.groups.world_cpu)
        return bool(votes == self.world_size) if all else bool(votes)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gathers over data parallel unless told otherwise.

        ``LightningModule.all_gather`` says the world where the user said nothing.
        """
        if group is None or group is dist.group.WORLD:
            group = self.groups.dp
        return super().all_gather(tensor, group, sync_grads)

    @override
    def barrier(self, name: str | None = None) -> None:
        if _lightning.world_is_initialized():
            on_gpu = self.root_device.type == "cuda"
            dist.barrier(device_ids=[self.root_device.index] if on_gpu else None)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not _lightning.world_is_initialized():
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]


def _reduce(tensor: Tensor, group: dist.ProcessGroup, reduce_op: Any) -> Tensor:
    """Reduces in place, as Lightning's strategies do but without their barrier before it.

    The barrier (fabric/utilities/distributed.py, _sync_ddp) holds the host until the device has
    caught up, and of a group that was not used before torch has to guess the device.
    """
    mean_of_sum = False
    if isinstance(reduce_op, str):
        name = "AVG" if reduce_op == "mean" else reduce_op.upper()
        mean_of_sum = name == "AVG" and dist.get_backend(group) == "gloo"
        reduce_op = dist.ReduceOp.SUM if mean_of_sum else getattr(dist.ReduceOp, name)
    dist.all_reduce(tensor, op=reduce_op, group=group)
    return tensor.copy_(tensor / group.size()) if mean_of_sum else tensor
