"""Which group a process group, kernel or copy belongs to, by name.

What a trace carries is taken first: the name and description of the process group. Kernels without
any of it (TransformerEngine's userbuffers, DeepEP, torch's symmetric memory) are found by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["COLLECTIVES", "GroupNames", "KernelRule", "group_of_description", "kernel_rule"]

_DESCRIPTIONS: tuple[tuple[str, str], ...] = (
    # megatron-core, parallel_state.py, `group_desc=`; the first match counts.
    (r"HYBRID_DP_CP", "cp"),
    (r"(HIERARCHICAL_)?CONTEXT_PARALLEL_GROUP", "cp"),
    (r"TENSOR_AND_CONTEXT_PARALLEL_GROUP", "tp"),
    (r"EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP", "mp"),
    (r"EXPERT_(TENSOR_AND_)?MODEL_PARALLEL_GROUP", "ep"),
    (r"EXPERT_TENSOR_PARALLEL_GROUP", "tp"),
    (r"(INTRA_PARTIAL_)?(EXPERT_)?DATA_PARALLEL_GROUP", "dp"),
    (r"INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP", "dp"),
    (r"TENSOR_MODEL_PARALLEL_GROUP", "tp"),
    (r"(EXPERT_)?GTP_WEIGHT_REMAT_GROUP", "tp"),
    (r"PIPELINE_MODEL_PARALLEL_GROUP", "pp"),
    (r"(POSITION_)?EMBEDDING_GROUP", "embedding"),
    (r"TENSOR_AND_DATA_PARALLEL_GROUP", "dp"),
    (r"MODEL_PARALLEL_GROUP", "mp"),
    (r"default_pg", "world"),
)


@dataclass(frozen=True, slots=True)
class KernelRule:
    """What a kernel's name says about it."""

    group: str | None
    """``None``: to be looked up in what launched it."""
    collective: str | None


_KERNELS: tuple[tuple[re.Pattern[str], KernelRule], ...] = tuple(
    (re.compile(pattern), KernelRule(group, collective))
    for pattern, group, collective in (
        # NCCL: ncclDevKernel_AllReduce_Sum_f32_RING_LL, ncclSymkDevKernel_..., ncclKernel_ (old).
        (r"nccl\w*Kernel_AllReduce", None, "all_reduce"),
        (r"nccl\w*Kernel_AllGather", None, "all_gather"),
        (r"nccl\w*Kernel_ReduceScatter", None, "reduce_scatter"),
        (r"nccl\w*Kernel_Broadcast", None, "broadcast"),
        (r"nccl\w*Kernel_Reduce_", None, "reduce"),
        (r"nccl\w*Kernel_SendRecv", None, "send_recv"),
        (r"nccl\w*Kernel", None, None),
        # TransformerEngine, comm_gemm_overlap/userbuffers/userbuffers.cu.
        (r"\buserbuffers_\w*_ag\b", "tp", "all_gather"),
        (r"\buserbuffers_\w*_rs(_oop)?", "tp", "reduce_scatter"),
        (r"\bk?userbuffers_", "tp", None),
        # DeepEP; deep_ep::layout only counts tokens on this rank, which is compute.
        (r"\bdeep_ep::(intranode|internode|internode_ll)::", "ep", None),
        (r"\bhybrid_ep::", "ep", None),
        # torch symmetric memory.
        (r"\b(one_shot|two_shot|multimem)_all_reduce", None, "all_reduce"),
        (r"\bmultimem_(one_shot_)?reduce|\bmultimem_all_gather", None, None),
    )
)

COLLECTIVES: dict[str, str] = {
    # 'Collective name' of NCCL kernels, and c10d operators without the namespace.
    "allreduce": "all_reduce",
    "allreduce_": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "allgather_": "all_gather",
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
    "reduce": "reduce",
    "reduce_": "reduce",
    "gather": "gather",
    "gather_": "gather",
    "scatter": "scatter",
    "scatter_": "scatter",
    "all_to_all": "all_to_all",
    "all_to_allv": "all_to_all",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "send": "send_recv",
    "recv": "send_recv",
    "recv_": "send_recv",
    "recv_any_source_": "send_recv",
}


def kernel_rule(name: str) -> KernelRule | None:
    """What the name of a kernel says; ``None`` for kernels that do not communicate."""
    for pattern, rule in _KERNELS:
        if pattern.search(name):
            return rule
    return None


def group_of_description(description: str) -> str | None:
    """The short name of one of the engine's groups by its description."""
    for pattern, group in _DESCRIPTIONS:
        if re.match(pattern, description):
            return group
    return None


@dataclass(frozen=True, slots=True)
class GroupNames:
    """Process groups of one rank by the name that torch gave them.

    Args:
        given: Short names (``tp``) by torch's name of the group (``group.group_name``), for example
            from ``strategy.groups``. They go before what descriptions say.
        described: Groups of the trace itself: description and ranks by torch's name.
    """

    given: Mapping[str, str] = field(default_factory=dict)
    described: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)

    def with_trace(self, distributed: Any) -> GroupNames:
        """Adds a trace's ``distributedInfo``."""
        configs = distributed.get("pg_config", []) if isinstance(distributed, Mapping) else []
        described = {
            str(config["pg_name"]): (str(config.get("pg_desc", "")), _ranks(config.get("ranks")))
            for config in configs
            if "pg_name" in config
        }
        return GroupNames(self.given, {**self.described, **described})

    def group(self, name: str | None, description: str | None = None) -> str:
        """Short name of a process group; ``other`` where nothing tells."""
        if name is not None and name in self.given:
            return self.given[name]
        if description is None and name is not None:
            description = self.described.get(name, ("", ()))[0]
        return group_of_description(description or "") or "other"

    def of_call(self, name: str | None, description: str | None, collective: str | None) -> str:
        """Short name of the group that a call belongs to.

        Sends and receives over the world group, or without a group, are the pipeline's where there
        is one (with two stages the engine sends in one direction over the world group:
        pipeline_parallel/p2p_communication.py, _p2p_ops), else of ring attention.
        """
        group = self.group(name, description)
        if collective == "send_recv" and group in ("world", "other"):
            for candidate in ("pp", "cp"):
                sizes = [self.size(n) for n in self.described if self.group(n) == candidate]
                if any(size is not None and size > 1 for size in sizes):
                    return candidate
        return group

    def size(self, name: str | None) -> int | None:
        """Ranks in a process group; ``None`` if the trace does not say."""
        ranks = self.described.get(name or "", ("", ()))[1]
        return len(ranks) or None


def _ranks(value: Sequence[int] | None) -> tuple[int, ...]:
    return tuple(int(rank) for rank in value or ())
