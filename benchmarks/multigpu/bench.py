"""What all groups share: the time that is left, the rows, and how ranks are started."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from multigpu import training
from multigpu.teams import Team


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
