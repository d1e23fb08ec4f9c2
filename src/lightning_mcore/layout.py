"""Rank arithmetic: sizes, world size and a rank give every size and coordinate of the rank grid.

Enters: ``ParallelSizes`` and two integers. Leaves: a frozen ``Layout``, or a ConfigurationError
that every rank raises alike. Pure: no process group is needed, so a process can ask about any rank.

Ranks are numbered in the engine's order "tp-cp-ep-dp-pp", the leftmost axis fastest. There are two
grids over the same ranks, one for dense layers and one for experts::

    rank = tp_rank  + tp  * (cp_rank + cp * (dp_rank  + dp  * pp_rank))
    rank = etp_rank + etp * (ep_rank + ep * (edp_rank + edp * pp_rank))
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

from lightning_mcore.config import ModelDims, ParallelSizes
from lightning_mcore.errors import ConfigurationError
from lightning_mcore.findings import Finding, Findings, raise_errors

__all__ = [
    "Axis",
    "Layout",
    "check_model_dims",
    "dims_findings",
    "layout_findings",
    "pick_vpp",
    "resolve_layout",
]

Axis: TypeAlias = Literal["tp", "cp", "dp", "pp", "dp_cp", "ep", "etp", "edp"]
"""An axis of the rank grid; ``dp_cp`` is data and context parallelism taken together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Sizes of the rank grid and this rank's place in it. Made by ``resolve_layout``."""

    tp: int
    """Tensor parallel size."""
    pp: int
    """Pipeline parallel size."""
    vpp: int | None
    """Model chunks per pipeline rank, 2 or more; ``None`` if there is one (also asked for as 1)."""
    cp: int
    """Context parallel size."""
    ep: int
    """Expert parallel size."""
    etp: int
    """Tensor parallel size inside experts."""
    dp: int
    """Data parallel size: copies of the model that see different samples."""
    world_size: int
    """Ranks in the job: ``tp * cp * dp * pp``."""
    rank: int
    """Global rank of this process."""
    tp_rank: int
    """Position in the tensor parallel group."""
    pp_rank: int
    """Position in the pipeline: stage ``pp_rank`` (and every ``pp``-th one after it) is here."""
    cp_rank: int
    """Position in the context parallel group."""
    dp_rank: int
    """Position in the data parallel group: which share of the samples this rank sees."""
    ep_rank: int
    """Position in the expert parallel group."""

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the dense layers: ``tp * pp``."""
        return self.tp * self.pp

    @property
    def dp_cp(self) -> int:
        """Ranks over which a gradient is reduced and the distributed optimizer shards."""
        return self.dp * self.cp

    @property
    def edp(self) -> int:
        """Copies of each expert: its gradients are reduced over so many ranks."""
        return self.world_size // (self.etp * self.ep * self.pp)

    @property
    def edp_rank(self) -> int:
        """Position among the copies of the experts that this rank holds."""
        return self.rank // (self.etp * self.ep) % self.edp

    @property
    def num_stages(self) -> int:
        """Stages in the whole pipeline, chunks counted: ``pp * (vpp or 1)``."""
        return self.pp * (self.vpp or 1)

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank holds the first stage (perhaps among others)."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the last stage (perhaps among others)."""
        return self.pp_rank == self.pp - 1

    def group_ranks(self, axis: Axis) -> tuple[int, ...]:
        """Global ranks of this rank's group along ``axis``, ascending; no collective is needed."""
        return self._group_of(self.rank, axis)

    def all_groups(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """Global ranks of every group along ``axis`` in the whole world, by first rank."""
        groups = (self._group_of(rank, axis) for rank in range(self.world_size))
        return tuple(dict.fromkeys(groups))

    def _group_of(self, rank: int, axis: Axis) -> tuple[int, ...]:
        size, stride = {
            "tp": (self.tp, 1),
            "cp": (self.cp, self.tp),
            "dp": (self.dp, self.tp * self.cp),
            "dp_cp": (self.dp_cp, self.tp),
            "pp": (self.pp, self.tp * self.dp_cp),
            "etp": (self.etp, 1),
            "ep": (self.ep, self.etp),
            "edp": (self.edp, self.etp * self.ep),
        }[axis]
        first = rank - (rank // stride % size) * stride
        return tuple(range(first, first + size * stride, stride))


def resolve_layout(sizes: ParallelSizes, world_size: int, rank: int) -> Layout:
    """Places ``rank`` in a grid of ``sizes`` over ``world_size`` ranks.

    Every rank computes the same sizes, and raises the same error, before any process group exists.

    Raises:
        ConfigurationError: If the world is not a multiple of what the dense layers or the experts
            need, or ``rank`` is not in it.
    """
    raise_errors(layout_findings(sizes, world_size, rank))
    tp, pp, cp, ep = sizes.tp, sizes.pp, sizes.cp, sizes.ep
    etp = tp if sizes.etp is None else sizes.etp
    dp = world_size // (tp * pp * cp)
    return Layout(
        tp=tp,
        pp=pp,
        vpp=sizes.vpp if sizes.vpp is not None and sizes.vpp > 1 else None,
        cp=cp,
        ep=ep,
        etp=etp,
        dp=dp,
        world_size=world_size,
        rank=rank,
        tp_rank=rank % tp,
        cp_rank=rank // tp % cp,
        dp_rank=rank // (tp * cp) % dp,
        pp_rank=rank // (tp * cp * dp),
        ep_rank=rank // etp % ep,
    )


def layout_findings(sizes: ParallelSizes, world_size: int, rank: int) -> list[Finding]:
    """What keeps ``rank`` from a place in the grid: empty, or one error on every rank alike."""
    found = Findings()
    tp, pp, cp, ep = sizes.tp, sizes.pp, sizes.cp, sizes.ep
    etp = tp if sizes.etp is None else sizes.etp
    dense, experts = tp * pp * cp, etp * ep * pp
    if world_size < 1 or world_size % dense:
        found.error(
            "world-size-multiple",
            f"`world_size` ({world_size}) must be a multiple of `tp` ({tp}) x `pp` ({pp}) x `cp`"
            f" ({cp}) = {dense}",
            f"use {_nearest_multiples(world_size, dense)} devices",
            world_size=world_size,
            tp=tp,
            pp=pp,
            cp=cp,
        )
    elif world_size % experts:
        devices = _nearest_multiples(world_size, math.lcm(dense, experts))
        smaller = ", or etp=1" if etp > 1 and world_size % (ep * pp) == 0 else ""
        found.error(
            "world-size-multiple-of-experts",
            f"`world_size` ({world_size}) must be a multiple of `etp` ({etp}) x `ep` ({ep}) x `pp`"
            f" ({pp}) = {experts} for the experts",
            f"use {devices} devices{smaller}",
            world_size=world_size,
            etp=etp,
            ep=ep,
            pp=pp,
        )
    elif not 0 <= rank < world_size:
        found.error(
            "rank-outside-world",
            f"`rank` ({rank}) must be at least 0 and below `world_size` ({world_size})",
            f"check the launcher's RANK and WORLD_SIZE, and use ranks 0 to {world_size - 1}",
            rank=rank,
            world_size=world_size,
        )
    return found.sorted()


def check_model_dims(
    dims: ModelDims, sizes: ParallelSizes | Layout, *, sequence_parallel: bool = False
) -> None:
    """Checks every dimension that was told against the sizes that must divide it.

    Raises:
        ConfigurationError: If some do not divide; on every rank alike.
    """
    raise_errors(dims_findings(dims, sizes, sequence_parallel=sequence_parallel))


def dims_findings(
    dims: ModelDims, sizes: ParallelSizes | Layout, *, sequence_parallel: bool = False
) -> list[Finding]:
    """An error for every dimension that was told and that a size does not divide."""
    found = Findings()
    tp, pp, cp, ep, vpp = sizes.tp, sizes.pp, sizes.cp, sizes.ep, sizes.vpp or 1
    layers, heads, groups = dims.num_layers, dims.num_attention_heads, dims.num_query_groups
    if layers is not None and layers % (pp * vpp):
        found.error(
            "layers-multiple-of-stages",
            f"`num_layers` ({layers}) must be a multiple of `pp` ({pp}) x `vpp` ({vpp}) ="
            f" {pp * vpp}",
            f"use {_nearest_multiples(layers, pp * vpp)} layers, or leave `num_layers`"
            " out of `model_dims` if your stages are uneven on purpose",
            num_layers=layers,
            pp=pp,
            vpp=vpp,
        )
    if heads is not None and heads % tp:
        found.error(
            "heads-multiple-of-tp",
            f"`num_attention_heads` ({heads}) must be a multiple of `tp` ({tp})",
            f"use {_nearest_multiples(heads, tp)} heads, or tp={math.gcd(heads, tp)}",
            num_attention_heads=heads,
            tp=tp,
        )
    # The engine gives a rank a copy of a shared group where there are fewer groups than ranks.
    if groups is not None and groups % tp and tp % groups:
        found.error(
            "query-groups-multiple-of-tp",
            f"`num_query_groups` ({groups}) must be a multiple or a divisor of `tp` ({tp})",
            f"use {_nearest_multiples(groups, tp)} groups, or tp={math.gcd(groups, tp)}",
            num_query_groups=groups,
            tp=tp,
        )
    if dims.num_moe_experts is not None and dims.num_moe_experts % ep:
        experts = dims.num_moe_experts
        found.error(
            "experts-multiple-of-ep",
            f"`num_moe_experts` ({experts}) must be a multiple of `ep` ({ep})",
            f"use {_nearest_multiples(experts, ep)} experts, or ep={math.gcd(experts, ep)}",
            num_moe_experts=experts,
            ep=ep,
        )
    if dims.seq_length is not None:
        _check_seq_length(dims.seq_length, tp if sequence_parallel else 1, cp, found)
    return found.sorted()


def pick_vpp(dims: ModelDims, pp: int) -> int:
    """Chooses chunks per rank for ``overlap_p2p=True`` with ``vpp=None``.

    Returns:
        The smallest ``vpp >= 2`` for which the layers divide by ``pp * vpp``: more chunks make the
        pipeline's bubble smaller but its transfers more frequent.

    Raises:
        ConfigurationError: If there is no pipeline, the layers are not known, or none fits.
    """
    if pp == 1:
        raise ConfigurationError(
            "`overlap_p2p` (True) needs `pp` (1) of at least 2: one stage sends nothing; use pp=2"
            " or more, or overlap_p2p='auto'."
        )
    if dims.num_layers is None:
        raise ConfigurationError(
            "`overlap_p2p` (True) needs `vpp` (None) of at least 2, and without the number of"
            " layers none can be chosen; set vpp, or give the LightningModule"
            " model_dims = {'num_layers': ...}."
        )
    layers = dims.num_layers
    for vpp in range(2, layers // pp + 1):
        if layers % (pp * vpp) == 0:
            return vpp
    fitting = [size for size in range(2, layers // 2 + 1) if _has_vpp(layers, size)]
    more = _next_interleaved(layers, pp)
    other_pp = f", pp={_closest(fitting, pp)}" if fitting else ""
    raise ConfigurationError(
        f"`overlap_p2p` (True) needs `num_layers` ({layers}) to be a multiple of `pp` ({pp}) x"
        f" `vpp` for some `vpp` of at least 2; use {more} layers{other_pp}, or"
        " overlap_p2p=False."
    )


def _check_seq_length(seq_length: int, tp: int, cp: int, found: Findings) -> None:
    if cp > 1 and seq_length % (2 * cp):
        found.error(
            "sequence-multiple-of-2cp",
            f"`seq_length` ({seq_length}) must be a multiple of 2 x `cp` ({cp}) = {2 * cp} for"
            " context parallelism",
            f"use {_nearest_multiples(seq_length, 2 * cp)} tokens",
            seq_length=seq_length,
            cp=cp,
        )
    elif tp > 1 and seq_length % (tp * cp):
        found.error(
            "sequence-multiple-of-tp",
            f"`seq_length` ({seq_length}) must be a multiple of `tp` ({tp}) x `cp` ({cp}) ="
            f" {tp * cp} for sequence parallelism",
            f"use {_nearest_multiples(seq_length, tp * cp)} tokens, or sequence_parallel=False",
            seq_length=seq_length,
            tp=tp,
            cp=cp,
        )


def _nearest_multiples(value: int, step: int) -> str:
    """The multiples of ``step`` on either side of ``value``, as words: ``"4 or 8"``."""
    below = max(value // step, 1) * step
    return f"{below} or {below + step}"


def _has_vpp(layers: int, pp: int) -> bool:
    return layers % pp == 0 and layers // pp >= 2


def _next_interleaved(layers: int, pp: int) -> int:
    """The smallest number of layers, at least ``layers``, that ``pp`` ranks can interleave."""
    return max(2, -(-layers // pp)) * pp


def _closest(values: list[int], wanted: int) -> int:
    return min(values, key=lambda value: (abs(value - wanted), value))
