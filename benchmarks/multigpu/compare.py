"""Measures the variants of a group in turns with its baseline, and writes down what happened."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from multigpu import training
from multigpu.cases import Case, Group, Plan
from multigpu.teams import Team, TeamError

_RECORDING_S = 40.0


class Clock:
    """The time that is left, and lines that say when they were printed."""

    def __init__(self, start_s: float, limit_s: float) -> None:
        self._start, self._limit_s = start_s, limit_s

    @property
    def passed_s(self) -> float:
        """Since the start."""
        return time.monotonic() - self._start

    @property
    def left_s(self) -> float:
        """Until the limit; negative after it."""
        return self._limit_s - self.passed_s

    def say(self, text: str) -> None:
        """Prints a line with the time."""
        print(f"[{self.passed_s:6.1f} s] {text}", flush=True)


class Results:
    """Rows, in a file that is whole after each of them."""

    def __init__(self, path: Path | None, setting: Mapping[str, Any]) -> None:
        self.content: dict[str, Any] = {"setting": dict(setting), "rows": []}
        self._path = path
        self.write()

    def add(self, row: dict[str, Any]) -> None:
        """Appends a row and writes the file."""
        self.content["rows"].append(row)
        self.write()

    def write(self) -> None:
        """Writes the file anew and puts it in place at once."""
        if self._path is not None:
            beside = self._path.with_name(self._path.name + ".part")
            beside.write_text(json.dumps(self.content, indent=1))
            os.replace(beside, self._path)


@dataclasses.dataclass(kw_only=True)
class Bench:
    """What all groups share."""

    world: int
    accelerator: str
    method: str
    """How ranks are started."""
    clock: Clock
    results: Results
    case_limit_s: float
    """For each call to the ranks of a case."""
    ahead: int = 6
    """Teams that start CUDA before it is their turn."""
    traces: Path | None = None
    """Where to keep traces."""

    def team(self, name: str, environment: Mapping[str, str]) -> Team:
        """Ranks that have begun to start CUDA."""
        team = Team(name, self.world, self.method, environment)
        team.send(training.touch_device, self.accelerator)
        return team

    def limit_s(self) -> float:
        """For the next call."""
        return max(1.0, min(self.case_limit_s, self.clock.left_s))


def missing(needs: tuple[str, ...], accelerator: str) -> str | None:
    """Why a case cannot run here, as far as can be known without trying."""
    for name in needs:
        if name == "gpu" and accelerator != "gpu":
            return "needs GPUs"
        if name != "gpu" and find_spec(name) is None:
            return f"needs the module {name}, which is not installed"
    return None


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
    if group.baseline.name in queue.skipped:
        _note(bench, group, group.baseline, "skipped", queue.skipped[group.baseline.name])
    else:
        home = _open(bench, group, group.baseline, queue, plan)
    for variant in group.variants:
        if variant.name in queue.skipped:
            _note(bench, group, variant, "skipped", queue.skipped[variant.name])
            continue
        if home is not None and not home.team.alive:
            # It died beside another variant, which has its row.
            _finish(bench, group, home)
            home = _open(bench, group, group.baseline, queue, plan)
        away = _open(bench, group, variant, queue, plan)
        if away is None:
            continue
        started = time.monotonic()
        try:
            _take_turns(home, away, plan)
        except TeamError as error:
            _note(bench, group, variant, "failed", str(error), error)
        else:
            for count in variant.microbatches:
                row = away.row(count)
                _compare(row, home, away, count, plan, same_weights=group.same_weights)
                bench.results.add(_head(group, variant, "measured") | row)
                say(f"{group.item}, {group.name}: {variant.name}, {_summary(row)}")
        say(f"    took {away.facts[0]['opening_s']:.1f} + {time.monotonic() - started:.1f} s")
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
    row: dict[str, Any],
    home: Opened | None,
    away: Opened,
    count: int,
    plan: Plan,
    *,
    same_weights: bool,
) -> None:
    """Ratio to the baseline's blocks of the same turns, and losses of the same steps."""
    if home is None or count not in home.blocks:
        return
    theirs = home.blocks[count][-plan.rounds :]
    row["baseline"] = home.case.name
    row["baseline_step_ms"] = [1e3 * value for value in theirs]
    ratios = [mine / other for mine, other in zip(away.blocks[count], theirs, strict=True)]
    row["ratios"] = ratios
    row["ratio"] = statistics.median(ratios)
    if same_weights and away.case.microbatches[0] == home.case.microbatches[0] == count:
        # From the first step on; later ones depend on what was run before them.
        pairs = list(zip(away.losses[count], home.losses[count], strict=False))
        row["loss_difference"] = max(abs(mine - other) for mine, other in pairs)


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


def _open(bench: Bench, group: Group, case: Case, queue: _Queue, plan: Plan) -> Opened | None:
    if bench.clock.left_s <= 0:
        _note(bench, group, case, "not run", "the time limit was reached")
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
