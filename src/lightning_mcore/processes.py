"""How the processes of a run start and talk: the part of the strategy that knows no model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies.parallel import ParallelStrategy
from torch import Tensor
from typing_extensions import override

from lightning_mcore import _lightning
from lightning_mcore.layout import Layout
from lightning_mcore.parallel_state import Groups
from lightning_mcore.step_log import ALREADY_REDUCED


class LayoutStrategy(ParallelStrategy):
    """Launches one process per device; collectives run over the layout's data-parallel axis.

    Model-parallel peers hold copies of what users log or gather, so a reduction over the world
    would count them several times.
    """

    def __init__(self, process_group_backend: str | None, timeout_s: float) -> None:
        super().__init__()
        self._backend = process_group_backend
        self._timeout_s = timeout_s
        self.num_nodes = 1

    @property
    def layout(self) -> Layout:
        """Sizes and this rank's coordinates."""
        raise NotImplementedError

    @property
    def groups(self) -> Groups:
        """Process groups of this rank."""
        raise NotImplementedError

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
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = _lightning.subprocess_launcher(
                self.cluster_environment,
                self.num_processes,
                self.num_nodes,
                self._launch_variables,
            )

    def _launch_variables(self) -> Mapping[str, str]:
        """Environment variables for the processes that Lightning starts, where they are unset."""
        return {}

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
            self.cluster_environment, self.root_device, self._backend, self._timeout_s
        )

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces over data parallel unless told otherwise: model-parallel peers hold copies."""
        if not isinstance(tensor, Tensor) or group is ALREADY_REDUCED:
            return tensor
        return _lightning.reduce_tensor(tensor, group or self.groups.dp_cp, reduce_op)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks (or any) decided so; over the world, on the host."""
        votes = torch.tensor(int(decision))
        dist.all_reduce(votes, group=self.groups.world_cpu)
        return bool(votes == self.world_size) if all else bool(votes)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gathers over data parallel unless told otherwise."""
        return super().all_gather(tensor, group or self.groups.dp, sync_grads)

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
