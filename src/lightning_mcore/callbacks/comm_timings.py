"""Logs where the time of a step goes: compute, communication of each group, idle.

What enters: a profile of a few steps on every rank. What leaves: scalars, a picture and a line in
the console. Every rank calls it; all log the same values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn
from typing_extensions import override

from lightning_mcore.callbacks._ranks import (
    describe_rank,
    gather_objects,
    layout_of,
    log_now,
)
from lightning_mcore.callbacks._sampling import Sample, SamplingCallback, StepSampler
from lightning_mcore.timeline import StepTimes, analyse, ideal_bubble_share
from lightning_mcore.timeline.pictures import has_matplotlib, stacked_bars
from lightning_mcore.timeline.summary import advice, scalars, summarise

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["CommTimings"]

_MOST_BARS = 24


class CommTimings(SamplingCallback):
    """Measures compute, exposed communication per group and idle time in a sample of steps.

    Every ``every_n_steps`` optimizer steps, ``window`` steps are recorded with ``torch.profiler``.
    At each moment of them a rank computes, or is *exposed* to communication that no compute covers,
    or is idle; the three add up to the step. Logged once per sample, to every logger and into
    ``callback_metrics``, the same on all ranks:

    * ``step/ms``, ``compute/ms``, ``idle/ms``, ``comm/exposed_ms``, ``comm/share`` (of the step),
      ``comm/overlap`` (share of the communication that compute covers);
    * ``comm/G/exposed_ms``, ``comm/G/share``, ``comm/G/total_ms``, ``comm/G/overlap``, and where
      sizes are known ``comm/G/mbytes``, ``comm/G/busbw_gbps``, ``comm/G/algbw_gbps`` (as in
      nccl-tests), for each group ``G`` that communicates: ``tp``, ``pp``, ``dp``, ``cp``, ``ep``,
      ``embedding``, ``mp`` (the gradient norm), ``world``, ``other``;
    * with a pipeline, ``pipeline/bubble_share`` (idle, and exposed pp, mp and world communication,
      which is mostly waiting for other stages) and ``pipeline/ideal_bubble_share`` of the schedule;
    * ``comm_timings/cost_ms``: what the sample cost on the rank where it cost most, and
      ``comm_timings/slowdown``: a recorded step over the median of those before it.

    Plain names are those of the median rank by compute time, ``NAME/slowest_rank`` and
    ``NAME/fastest_rank`` those of the ranks that compute most and least. TensorBoard also gets a
    picture of all ranks, and the console a line that says which group costs most and which switch
    would address it.

    On a GPU the intervals are kernels and copies of all streams, also those of userbuffers and
    DeepEP, which NCCL does not know of. On CPU they are gloo's, and what the thread does meanwhile.

    Cost: between samples two comparisons and two reads of the host's clock per batch. For a sample,
    the start and reading of a profile (logged), and two waits for the device.

    Args:
        every_n_steps: Optimizer steps between samples.
        window: Optimizer steps recorded in a sample; more even out differences between steps.
        picture: Whether to draw the picture; needs matplotlib and a TensorBoardLogger.

    Raises:
        ConfigurationError: If a number is less than 1, or ``window`` above ``every_n_steps``.
    """

    def __init__(self, every_n_steps: int = 500, window: int = 2, *, picture: bool = True) -> None:
        super().__init__(StepSampler(every_n_steps, window))
        self.picture = picture
        self.latest: list[StepTimes] = []
        """Figures of the latest sample, by rank; the same on every rank."""

    @override
    def _report(self, trainer: Trainer, sample: Sample) -> None:
        of_ranks = gather_objects(trainer, _figures(sample))
        problems = {rank: found[1] for rank, found in enumerate(of_ranks) if found[0] is None}
        if problems:
            rank, problem = next(iter(problems.items()))
            rank_zero_warn(
                f"CommTimings has no figures for step {sample.first_step}: on"
                f" {describe_rank(trainer, rank)}, {problem}."
            )
            return
        self.latest = [found[0] for found in of_ranks]
        values = scalars(self.latest, _ideal(trainer, self.latest))
        values["comm_timings/cost_ms"] = 1e3 * max(found[2] for found in of_ranks)
        slowdowns = [found[3] for found in of_ranks if found[3] is not None]
        if slowdowns:
            values["comm_timings/slowdown"] = max(slowdowns)
        log_now(trainer, values)
        effective = _could_be_on(getattr(trainer.strategy, "switches", None))
        rank_zero_info(
            f"CommTimings, step {sample.first_step}: {advice(self.latest, effective)} Sampling"
            f" took {values['comm_timings/cost_ms']:.0f} ms."
        )
        if self.picture:
            _draw(trainer, self.latest, sample.first_step)


def _could_be_on(switches: Any) -> dict[str, Any]:
    """Effective values of switches, without those that something else keeps off."""
    found = {}
    for name in getattr(switches, "__dataclass_fields__", ()):
        switch = getattr(switches, name)
        free = switch.requested is False or switch.evidence == "candidate"
        if switch.effective or free or "comm='safe'" in switch.reason:
            found[name] = switch.effective
    return found


def _figures(sample: Sample) -> tuple[StepTimes | None, str | None, float, float | None]:
    """What other ranks must know; problems too, since they wait for this rank's answer."""
    if sample.timeline is None:
        return None, sample.problem, sample.cost_s, sample.slowdown
    try:
        times = analyse(sample.timeline, steps=sample.steps)
    except Exception as error:
        problem = f"its trace could not be read: {type(error).__name__}: {error}"
        return None, problem, sample.cost_s, None
    return times, None, sample.cost_s, sample.slowdown


def _ideal(trainer: Trainer, times: Sequence[StepTimes]) -> float | None:
    layout = layout_of(trainer)
    microbatches = times[0].microbatches
    if layout is None or layout.pp == 1 or not microbatches:
        return None
    return ideal_bubble_share(layout.pp, layout.vpp, microbatches)


@rank_zero_only
def _draw(trainer: Trainer, times: Sequence[StepTimes], step: int) -> None:
    experiments = [getattr(logger, "experiment", None) for logger in trainer.loggers]
    boards: list[Any] = [board for board in experiments if hasattr(board, "add_figure")]
    if not boards:
        return
    if not has_matplotlib():
        rank_zero_info(
            "CommTimings draws no picture: matplotlib is missing; use pip install"
            " 'lightning-mcore[plots]', or CommTimings(picture=False)."
        )
        return
    shown: Sequence[int] = range(len(times))
    if len(times) > _MOST_BARS:
        # From the slowest to the fastest at even distances, both included.
        order = sorted(shown, key=lambda rank: -times[rank].compute_us)
        last = len(order) - 1
        shown = [order[round(i * last / (_MOST_BARS - 1))] for i in range(_MOST_BARS)]
    chosen = summarise(times)
    names = {chosen.fastest: "fastest", chosen.median: "median", chosen.slowest: "slowest"}
    bars = {
        describe_rank(trainer, rank) + (f", {names[rank]}" if rank in names else ""): times[rank]
        for rank in shown
    }
    for board in boards:
        board.add_figure("comm/step", stacked_bars(bars, f"step {step}"), global_step=step)
