"""What ranks tell each other about failures, and the words for it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from lightning_mcore.watch.progress import describe

Kind = Literal["raised", "communication", "died", "lost", "hang"]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why one rank cannot go on."""

    kind: Kind
    """``raised`` an exception of its own; ``communication``: one that another rank's end may have
    caused; ``died`` without a word; ``lost``: alive or not, nothing is heard of it; ``hang``."""
    rank: int
    where: str
    """The rank's coordinates, host and process."""
    status: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""
    """Traceback, or reports of all ranks for a hang."""
    quiet_s: float = 0.0
    """Seconds since the last sign of life or progress."""

    def message(self) -> str:
        """What happened where, the original traceback first."""
        who = f"Rank {self.rank} ({self.where})"
        at = describe(dict(self.status))
        if self.kind in ("raised", "communication"):
            return f"{self.text.rstrip()}\n\n{who} raised this in {at}."
        if self.kind == "died":
            return (
                f"{who} died without an exception (killed, out of memory, or a crash in native"
                f" code). Last heard of in {at}."
            )
        if self.kind == "lost":
            return (
                f"{who} has not been heard of for {self.quiet_s:.0f} s (its host, its link or its"
                f" process is stuck). Last heard of in {at}."
            )
        return f"{who} made no progress for {self.quiet_s:.0f} s, in {at}.\n\n{self.text}"

    def as_dict(self) -> dict[str, Any]:
        """For the wire."""
        return asdict(self)


def hang_report(reports: Mapping[int, Mapping[str, Any]], silent: Sequence[int]) -> str:
    """Where every rank is and for whom it waits; ranks at the same place are told together.

    Args:
        reports: By rank: ``where``, ``status``, ``wait`` (``op``, ``group``, ``ranks``; or None),
            ``on_device`` (what NCCL has not finished) and ``stack``.
        silent: Ranks that did not answer.
    """
    lines = [f"Rank {rank} did not answer." for rank in silent]
    stacks: dict[str, list[int]] = {}
    for rank, report in sorted(reports.items()):
        wait = report.get("wait")
        line = f"Rank {rank} ({report.get('where')}): {describe(dict(report.get('status', {})))}"
        if wait:
            missing = [
                other
                for other in wait["ranks"]
                if other != rank and not _same_wait(wait, reports.get(other, {}).get("wait"))
            ]
            line += f"; waits in {wait['op']} over {wait['group']} (ranks {wait['ranks']})"
            line += f" for ranks {missing}" if missing else ", like all its members"
        else:
            line += "; in no collective that is known here"
        if report.get("on_device"):
            line += f"; unfinished on the device: {', '.join(report['on_device'])}"
        lines.append(f"{line}.")
        stacks.setdefault(str(report.get("stack", "")), []).append(rank)
    for stack, ranks in stacks.items():
        lines.append(f"\nStack of rank(s) {ranks} (most recent call last):\n{stack.rstrip()}")
    return "\n".join(lines)


def _same_wait(mine: Mapping[str, Any], theirs: Mapping[str, Any] | None) -> bool:
    return theirs is not None and (mine["op"], mine["ranks"]) == (theirs["op"], theirs["ranks"])
