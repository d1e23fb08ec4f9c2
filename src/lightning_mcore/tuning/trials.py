"""What a tuner tries: the baseline, each switch alone, presets, and the winners together.

Pure: arguments of the strategy in, arguments of the strategy out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_mcore.errors import ConfigurationError

__all__ = ["BASELINE", "SWITCHES", "Measurement", "Refusal", "Trial", "combine", "plan_trials"]

BASELINE = "safe"
"""Name of the trial that all others are compared with: ``comm="safe"``."""

SWITCHES: tuple[Mapping[str, Any], ...] = (
    {"sequence_parallel": True},
    {"tp_comm_overlap": True, "sequence_parallel": True},
    {"use_distributed_optimizer": True},
    {"overlap_grad_reduce": True},
    {
        "overlap_param_gather": True,
        "overlap_grad_reduce": True,
        "use_distributed_optimizer": True,
    },
    {"average_in_collective": True},
    {"overlap_p2p": True},
    {"overlap_p2p_warmup_flush": True, "overlap_p2p": True},
    {"moe_dispatcher": "deepep"},
    {"overlap_moe": "1f1b"},
    {"overlap_moe": "shared_experts"},
)
"""The switches tried alone, each with those it cannot do without; the first names the trial."""

_FOLLOWERS = {"delay_wgrad_compute", "num_distributed_optimizer_instances"}
"""Arguments that need a switch, which the baseline has off."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One way to run the job."""

    name: str
    """What tables call it."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """All arguments of its MCoreStrategy."""
    change: Mapping[str, Any] = field(default_factory=dict)
    """Those that differ from the baseline."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What the windows of one trial showed; one entry per round where there are several."""

    trial: Trial
    step_s: Sequence[float]
    """Seconds per optimizer step of the slowest rank, by round."""
    losses: Sequence[Sequence[float]]
    """Training loss of every step, warm-up included, by round."""
    grad_norms: Sequence[Sequence[float]]
    """Global gradient norm of every step, warm-up included, by round."""
    peak_bytes: int
    """Memory of the fullest rank: allocated on the GPU, resident on the CPU."""
    exposed_ms: Mapping[str, float] = field(default_factory=dict)
    """Communication per step that no computation hid, by group, on the median rank; ms."""
    switches: Mapping[str, str] = field(default_factory=dict)
    """Effective value of each switch."""


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A trial that cannot run."""

    trial: Trial
    reason: str
    """What the strategy said."""


def plan_trials(
    arguments: Mapping[str, Any],
    known: Iterable[str],
    extra: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[Trial]:
    """The trials of the first phase, the baseline first.

    Args:
        arguments: The user's strategy arguments. Sizes, ``micro_batch_size`` and what else is no
            switch stay; every switch is set by the trials.
        known: Arguments that the strategy has.
        extra: Further trials by name: arguments on top of the baseline's.

    Raises:
        ConfigurationError: If an extra trial has no arguments, one the strategy does not know, or a
            name that is taken.
    """
    known = set(known)
    switches = {name for change in SWITCHES for name in change} | _FOLLOWERS
    kept = {name: value for name, value in arguments.items() if name not in switches | {"comm"}}
    base = kept | {"comm": "safe"}
    trials = [Trial(name=BASELINE, arguments=base)]
    for change in SWITCHES:
        if set(change) <= known:
            first, value = next(iter(change.items()))
            name = first if value is True else f"{first}={value}"
            trials.append(Trial(name=name, arguments=base | dict(change), change=change))
    for preset in ("auto", "max"):
        change = {"comm": preset}
        trials.append(Trial(name=f"comm={preset}", arguments=kept | change, change=change))
    if _differs(arguments, kept):
        change = {name: value for name, value in arguments.items() if name not in kept}
        trials.append(Trial(name="as configured", arguments=dict(arguments), change=change))
    for name, change in (extra or {}).items():
        unknown = sorted(set(change) - known)
        if unknown or not change or any(trial.name == name for trial in trials):
            problem = f"has unknown arguments {unknown}" if unknown else "is empty or named twice"
            raise ConfigurationError(
                f"Trial {name!r} {problem}; give it a name of its own and arguments of"
                " MCoreStrategy."
            )
        trials.append(Trial(name=name, arguments=base | dict(change), change=change))
    return trials


def _differs(arguments: Mapping[str, Any], kept: Mapping[str, Any]) -> bool:
    """Whether the user decided on a switch, which makes the job as configured worth a trial."""
    return any(value not in ("auto", None) for name, value in arguments.items() if name not in kept)


def combine(base: Trial, winners: Sequence[Trial]) -> Trial | None:
    """All winners at once, on top of the baseline; ``None`` if that would be none or one of them.

    Presets are left out: they set everything themselves. Of two winners that give one switch
    different values, the earlier one keeps it.
    """
    change: dict[str, Any] = {}
    for winner in winners:
        if "comm" not in winner.change:
            change = {**winner.change, **change}
    if not change or any(dict(winner.change) == change for winner in winners):
        return None
    return Trial(name="winners together", arguments={**base.arguments, **change}, change=change)
