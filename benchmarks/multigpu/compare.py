"""Measures the variants of a group in turns with its baseline, and writes down what happened."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from multigpu import training
from multigpu.bench import Bench, missing
from multigpu.cases import Case, Group, Plan
from multigpu.teams import Team, TeamError

_RECORDING_S = 40.0
_LEAST_S = {"gpu": 20.0, "cpu": 1.0}
"""What opening a case and its first steps take at least."""


class Opened:
    """A case whose ranks are ready for blocks."""

    def __init__(self, bench: Bench, case: Case, team: Team, plan: Plan) -> None:
        self.case, self.team = case, team
        self._bench, self._plan = bench, plan
        limit = bench.limit_s()
        team.receive(limit)  # touch_device
        self.facts = team.call(training.open_case, case, bench.accelerator, limit_s=limit)
        self.blocks: dict[int, list[float]] = {}
        self.losses: dict[int, list[float]] = {}
        self.recorded: dict[int, Any] = {}
        self.lateness: dict[int, Any] = {}
        self.peak_bytes = 0

    def warm_up(self, microbatches: int) -> None:
        """Runs the first steps of a number of microbatches, once."""
        if microbatches not in self.blocks:
            self._run(microbatches, self._plan.warmup, 0)
            self.blocks[microbatches] = []

    def block(self, microbatches: int) -> float:
        """Seconds per step of the slowest rank in a block of steps."""
        steps = self._plan.steps_of(self.case, microbatches)
        seconds = self._run(microbatches, self._plan.lead, steps)
        self.blocks[microbatches].append(seconds)
        return seconds

    def _run(self, microbatches: int, lead: int, steps: int) -> float:
        found = self.team.call(
            training.run_block, microbatches, lead, steps, limit_s=self._bench.limit_s()
        )
        self.losses.setdefault(microbatches, []).extend(found[0]["losses"])
        self.peak_bytes = max(self.peak_bytes, *(each["peak_bytes"] for each in found))
        return float(max(each["step_s"] for each in found))

    def record(self) -> None:
        """Records steps of each number of microbatches; after all blocks, which are then not slower
        for what a profiler leaves behind. Few seconds, so also when the time limit is near.
        """
        for count in self.case.microbatches:
            if not self.blocks.get(count):
                continue
            self.recorded[count] = self.team.call(
                training.record, count, self._plan.window, limit_s=_RECORDING_S
            )[0]
            # Of the fewest microbatches: with more, the same passes are repeated.
            if self.case.lateness and count == min(self.case.microbatches):
                keep = None if self._bench.traces is None else str(self._bench.traces)
                self.lateness[count] = self.team.call(
                    training.find_lateness, keep, limit_s=_RECORDING_S
                )

    def row(self, microbatches: int) -> dict[str, Any]:
        """What was found with a number of microbatches."""
        facts = self.facts[0]
        seconds = self.blocks[microbatches]
        step_s = statistics.median(seconds)
        replicas = self.case.data_parallel(self._bench.world)
        per_step = microbatches * replicas
        return {
            "microbatches": microbatches,
            "step_ms": [1e3 * value for value in seconds],
            "median_step_ms": 1e3 * step_s,
            "tokens_per_s": facts["tokens_of_a_microbatch"] * per_step / step_s,
            "tflops_per_gpu": facts["flops_of_a_microbatch"]
            * per_step
            / step_s
            / self._bench.world
            / 1e12,
            "peak_gib": self.peak_bytes / 2**30,
            "losses": self.losses[microbatches],
            "recorded": self.recorded.get(microbatches),
            "lateness": self.lateness.get(microbatches),
            "switches": facts.get("switches"),
            "layers": facts["layers"],
            "parameters_by_rank": [each["parameters"] for each in self.facts],
            "opening_s": facts["opening_s"],
        }


def run_group(bench: Bench, group: Group, plan: Plan) -> None:
    """Measures each variant in turns with the baseline; every case gets a row, whatever happens."""
    queue = _Queue(bench, group)
    say = bench.clock.say
    home: Opened | None = None
    peers = _Peers()
    least_s = _LEAST_S[bench.accelerator]
    longest_s = 0.0
    """Of what a variant took, per number of microbatches."""
    if group.baseline.name in queue.skipped:
        _note(bench, group, group.baseline, "skipped", queue.skipped[group.baseline.name])
    else:
        home = _open(bench, group, group.baseline, queue, plan, least_s)
    for variant in group.variants:
        if variant.name in queue.skipped:
            _note(bench, group, variant, "skipped", queue.skipped[variant.name])
            continue
        # A variant that is cut off would take the baseline with it, and its recording.
        needed_s = max(least_s, longest_s * len(variant.microbatches))
        if home is not None and not home.team.alive:
            # It died beside another variant, which has its row.
            _finish(bench, group, home)
            home = _open(bench, group, group.baseline, queue, plan, least_s)
        started = time.monotonic()
        away = _open(bench, group, variant, queue, plan, needed_s)
        if away is None:
            continue
        if home is not None:
            peers.add(home)
        try:
            _take_turns(home, away, plan)
        except TeamError as error:
            _note(bench, group, variant, "failed", str(error), error)
        else:
            for count in variant.microbatches:
                row = away.row(count)
                _compare(row, home, away, count, plan)
                peers.compare(row, away, count)
                bench.results.add(_head(group, variant, "measured") | row)
                say(f"{group.item}, {group.name}: {variant.name}, {_summary(row)}")
        took_s = time.monotonic() - started
        longest_s = max(longest_s, took_s / len(variant.microbatches))
        say(f"    took {took_s:.1f} s, of them {away.facts[0]['opening_s']:.1f} s to open")
        away.team.end()
    if home is not None:
        if home.team.alive and not any(home.blocks.values()):
            try:  # All variants were skipped or failed.
                for count in group.baseline.microbatches:
                    home.warm_up(count)
                    for _ in range(plan.rounds):
                        home.block(count)
            except TeamError as error:
                _note(bench, group, group.baseline, "failed", str(error), error)
        _finish(bench, group, home)
    queue.end()


def _take_turns(home: Opened | None, away: Opened, plan: Plan) -> None:
    for count in away.case.microbatches:
        both = [away] if home is None or count not in home.case.microbatches else [home, away]
        for each in both:
            each.warm_up(count)
        for turn in range(plan.rounds):
            for each in both if turn % 2 == 0 else both[::-1]:
                each.block(count)
    away.record()


def _compare(
    row: dict[str, Any], home: Opened | None, away: Opened, count: int, plan: Plan
) -> None:
    """Ratio to the baseline's blocks of the same turns."""
    if home is None or count not in home.blocks:
        return
    theirs = home.blocks[count][-plan.rounds :]
    row["baseline"] = home.case.name
    row["baseline_step_ms"] = [1e3 * value for value in theirs]
    ratios = [mine / other for mine, other in zip(away.blocks[count], theirs, strict=True)]
    row["ratios"] = ratios
    row["ratio"] = statistics.median(ratios)


class _Peers:
    """Cases of a group by what their weights and batches follow from, to compare losses."""

    def __init__(self) -> None:
        self._first: dict[tuple[Any, ...], Opened] = {}

    def add(self, opened: Opened) -> Opened:
        """The first case with the weights and batches of this one, which may be this one."""
        case = opened.case
        # Seeds of weights follow from the rank's place in all axes but data parallelism.
        sizes = (case.pp, case.vpp, *(case.strategy.get(axis, 1) for axis in ("tp", "cp", "ep")))
        of_batches = (case.micro_batch, case.microbatches[0])
        return self._first.setdefault((case.framework, *sizes, *of_batches), opened)

    def compare(self, row: dict[str, Any], opened: Opened, count: int) -> None:
        """Notes how far the losses of the first steps are from those of the first such case."""
        first = self.add(opened)
        # Of the first steps; later ones depend on what was run before them.
        if first is not opened and count == opened.case.microbatches[0]:
            pairs = list(zip(opened.losses[count], first.losses[count], strict=False))
            row["loss_difference"] = max(abs(mine - other) for mine, other in pairs)
            row["loss_peer"] = first.case.name


def _summary(row: Mapping[str, Any]) -> str:
    ratio = f", {row['ratio']:.3f} x {row['baseline']}" if "ratio" in row else ""
    return (
        f"{row['microbatches']} microbatches: {row['median_step_ms']:.1f} ms"
        f" ({min(row['step_ms']):.1f}-{max(row['step_ms']):.1f}){ratio},"
        f" {row['tflops_per_gpu']:.0f} TFLOP/s, {row['peak_gib']:.1f} GiB"
    )


def _head(group: Group, case: Case, status: str) -> dict[str, Any]:
    return {
        "item": group.item,
        "group": group.name,
        "case": case.name,
        "status": status,
        "is_baseline": case is group.baseline,
        "pp": case.pp,
        "vpp": case.vpp,
        "micro_batch": case.micro_batch,
        "framework": case.framework,
        "strategy": {name: repr(value) for name, value in case.strategy.items()},
        "environment": dict(case.environment),
    }


def _note(
    bench: Bench,
    group: Group,
    case: Case,
    status: str,
    reason: str,
    error: TeamError | None = None,
) -> None:
    row = _head(group, case, status) | {"reason": _short(reason)}
    if error is not None:
        row["errors"] = {str(rank): text for rank, text in error.errors.items()}
    bench.results.add(row)
    bench.clock.say(f"{group.item}, {group.name}: {case.name} {status}: {row['reason']}")


def _short(reason: str) -> str:
    """A line for the table; the errors themselves are in the JSON."""
    return " ".join(reason.split())[:400]


def _open(
    bench: Bench, group: Group, case: Case, queue: _Queue, plan: Plan, needed_s: float
) -> Opened | None:
    left_s = bench.clock.left_s
    if left_s < needed_s:
        reason = (
            f"of the time, {max(left_s, 0.0):.0f} s were left, and it may take {needed_s:.0f} s"
        )
        _note(bench, group, case, "not run", reason)
        return None
    team = queue.take(case)
    try:
        return Opened(bench, case, team, plan)
    except TeamError as error:
        _note(bench, group, case, "refused" if error.refused else "failed", str(error), error)
        if error.refused:
            team.end()
        return None


def _finish(bench: Bench, group: Group, home: Opened) -> None:
    if home.team.alive:
        try:
            home.record()
        except TeamError as error:
            bench.clock.say(f"{home.case.name} was not recorded: {error}")
    for count in home.case.microbatches:
        if home.blocks.get(count):
            row = home.row(count)
            bench.results.add(_head(group, home.case, "measured") | row)
            bench.clock.say(f"{group.item}, {group.name}: {home.case.name}, {_summary(row)}")
    if home.team.alive:
        home.team.end()


class _Queue:
    """Teams of the next cases of a group, started before it is their turn."""

    def __init__(self, bench: Bench, group: Group) -> None:
        self._bench = bench
        cases = [group.baseline, *group.variants]
        reasons = {case.name: missing(case.needs, bench.accelerator) for case in cases}
        self.skipped = {name: reason for name, reason in reasons.items() if reason}
        self._coming = [case for case in cases if case.name not in self.skipped]
        self._teams: dict[str, Team] = {}

    def take(self, case: Case) -> Team:
        """The team of a case, which is no longer of the queue."""
        if case not in self._coming:  # A baseline that is opened again.
            return self._bench.team(case.name, case.environment)
        if case.name not in self._teams:
            # All at once: while one case is measured, no other may start CUDA.
            for other in self._coming[: self._bench.ahead]:
                self._teams[other.name] = self._bench.team(other.name, other.environment)
        self._coming.remove(case)
        return self._teams.pop(case.name)

    def end(self) -> None:
        """Ends teams whose turn never came."""
        for team in self._teams.values():
            team.kill()


def run_once(
    bench: Bench,
    item: str,
    function: Callable[..., Any],
    *args: Any,
    limit_s: float,
    environment: Mapping[str, str] | None = None,
) -> None:
    """One call to a team of its own, whose answers become a row."""
    say = bench.clock.say
    row: dict[str, Any] = {"item": item, "group": item, "case": item}
    if bench.clock.left_s <= 0:
        bench.results.add(row | {"status": "not run", "reason": "the time limit was reached"})
        say(f"{item} not run: the time limit was reached")
        return
    limit = max(1.0, min(limit_s, bench.clock.left_s))
    team = bench.team(item, environment or {})
    try:
        team.receive(limit)
        found = team.call(function, *args, limit_s=limit)
    except TeamError as error:
        reason = _short(str(error))
        errors = {str(rank): text for rank, text in error.errors.items()}
        bench.results.add(row | {"status": "failed", "reason": reason, "errors": errors})
        say(f"{item} failed: {reason}")
        if error.refused:
            team.end()
        return
    bench.results.add(row | {"status": "measured", "by_rank": found})
    say(f"{item} done")
    team.end()
