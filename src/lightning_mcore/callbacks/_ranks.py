"""What callbacks need to know about ranks, under our strategy and under others.

What enters: the Trainer. What leaves: values of all ranks, and how to call a rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_mcore.config import ParallelSizes
from lightning_mcore.layout import Layout, resolve_layout
from lightning_mcore.timeline import GroupNames

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_mcore.parallel_state import Groups


def gather_objects(trainer: Trainer, value: Any) -> list[Any]:
    """The values of all ranks, by rank; collective over the world, on the host where possible."""
    if trainer.world_size == 1 or not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value, group=_world(trainer))
    return found


def wait_for_all(trainer: Trainer) -> None:
    """Returns once every rank has called it; over gloo where possible."""
    if trainer.world_size > 1 and dist.is_initialized():
        dist.barrier(group=_world(trainer))


def _world(trainer: Trainer) -> dist.ProcessGroup | None:
    groups: Groups | None = getattr(trainer.strategy, "groups", None)
    return groups.world_cpu if groups is not None else None


def group_names(trainer: Trainer) -> GroupNames:
    """Short names of the strategy's process groups; the engine's others tell by themselves."""
    groups: Groups | None = getattr(trainer.strategy, "groups", None)
    if groups is None:
        return GroupNames()
    named = {
        "mp": groups.mp,
        "world": groups.world_cpu,
        "dp": groups.dp,
        "cp": groups.cp,
        "ep": groups.ep,
        "pp": groups.pp,
        "tp": groups.tp,
    }
    given = {str(group.group_name): name for name, group in named.items()}
    return GroupNames({str(groups.dp_cp.group_name): "dp", **given})


def layout_of(trainer: Trainer) -> Layout | None:
    """The strategy's layout; ``None`` under another strategy."""
    layout = getattr(trainer.strategy, "layout", None)
    return layout if isinstance(layout, Layout) else None


def layout_of_rank(layout: Layout, rank: int) -> Layout:
    """The same layout as another rank sees it."""
    sizes = ParallelSizes(
        tp=layout.tp, pp=layout.pp, vpp=layout.vpp, cp=layout.cp, ep=layout.ep, etp=layout.etp
    )
    return resolve_layout(sizes, layout.world_size, rank)


def describe_rank(trainer: Trainer, rank: int) -> str:
    """A rank with its coordinates along the axes that have several: ``rank 5 (pp 1, tp 1)``."""
    layout = layout_of(trainer)
    if layout is None:
        return f"rank {rank}"
    there = layout_of_rank(layout, rank)
    places = [
        f"{axis} {getattr(there, f'{axis}_rank')}"
        for axis in ("pp", "dp", "cp", "ep", "tp")
        if getattr(there, axis) > 1
    ]
    return f"rank {rank} ({', '.join(places)})" if places else f"rank {rank}"


def log_now(trainer: Trainer, values: dict[str, float]) -> None:
    """Logs values that all ranks hold alike for the step that has just ended.

    Straight to the loggers, as Lightning's LearningRateMonitor does: through ``self.log`` a value
    reaches them only in a step that ``log_every_n_steps`` picks. Every rank calls it.
    """
    trainer.callback_metrics.update(
        {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
    )
    _to_loggers(trainer, values)


@rank_zero_only
def _to_loggers(trainer: Trainer, values: dict[str, float]) -> None:
    for logger in trainer.loggers:
        # Values of `self.log` of the same step carry this number too.
        logger.log_metrics(values, step=trainer.global_step - 1)
