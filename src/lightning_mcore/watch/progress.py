"""Where this rank is in a run: written by the main thread, read by its monitor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Progress", "describe"]


@dataclass(slots=True)
class Progress:
    """Plain attributes: setting them costs nothing, and a reader sees one value or the next."""

    step: int = 0
    """Optimizer steps completed."""
    microbatch: int | None = None
    """Microbatch that the schedule runs, or ran last in this phase."""
    phase: str = "the start of the run"
    count: int = 0
    """Grows with everything that happens; a hang is when it does not."""
    is_finishing: bool = False
    """Whether the main thread completes a save after an error: it is in no collective then, ends by
    itself, and must be given the time."""
    checkpoints: list[str] = field(default_factory=list)
    """Checkpoints that this run has completed or started from, oldest first."""

    def enter(self, phase: str, microbatch: int | None = None) -> None:
        """Notes that a phase or microbatch begins."""
        self.phase = phase
        self.microbatch = microbatch
        self.count += 1

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Notes a phase, and afterwards the one from before; after an error it stays."""
        before = self.phase
        self.enter(phase)
        yield
        self.enter(before)

    def status(self) -> dict[str, Any]:
        """What others are told with each sign of life."""
        return {"step": self.step, "microbatch": self.microbatch, "phase": self.phase}

    def resume_hint(self) -> str:
        """The last step, and the newest checkpoint that still exists."""
        kept = [path for path in self.checkpoints if Path(path).exists()]
        source = (
            f"Resume with ckpt_path={kept[-1]!r}." if kept else "No checkpoint had been completed."
        )
        return f"Last step completed: {self.step}. {source}"


def describe(status: dict[str, Any]) -> str:
    """A status in words."""
    where = f"step {status.get('step', 0) + 1}, {status.get('phase', 'unknown')}"
    microbatch = status.get("microbatch")
    return where if microbatch is None else f"{where}, microbatch {microbatch}"
