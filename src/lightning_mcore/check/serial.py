"""What a configuration would run, as plain values for ``--json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_mcore.check.report import Run

__all__ = ["run_as_dict"]

_SIZES = ("tp", "pp", "vpp", "cp", "dp", "ep", "etp", "edp")


def run_as_dict(run: Run) -> dict[str, Any]:
    """Layout, batch arithmetic, places of groups, and every switch with its reason."""
    layout, switches = run.layout, run.switches
    return {
        "world_size": run.world_size,
        "precision": run.facts.precision,
        "layout": None if layout is None else {name: getattr(layout, name) for name in _SIZES},
        "micro_batch_size": run.config.request.switches.micro_batch_size,
        "batch_size": run.config.batch_size,
        "accumulate_grad_batches": run.config.accumulate_grad_batches,
        "num_microbatches": run.num_microbatches,
        "bubble": run.bubble,
        "groups": {
            axis: {
                "size": place.size,
                "count": place.count,
                "reach": place.reach,
                "nodes": place.nodes,
                "domains": place.domains,
            }
            for axis, place in run.groups.items()
        },
        "experts": None
        if run.experts is None
        else {
            "experts_per_rank": run.experts.experts_per_rank,
            **{
                row.name: _switch(getattr(run.experts.switches, row.name))
                for row in fields(run.experts.switches)
            },
        },
        "switches": None
        if switches is None
        else {row.name: _switch(getattr(switches, row.name)) for row in fields(switches)},
    }


def _switch(switch: Any) -> dict[str, Any]:
    return {
        "requested": _plain(switch.requested),
        "effective": _plain(switch.effective),
        "reason": switch.reason,
        "evidence": switch.evidence,
    }


def _plain(value: Any) -> Any:
    """Types that JSON has; anything else as text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)
