"""Ranks that do something together: all of them succeed, or all raise the same error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from lightning_mcore.checkpoint_files import cause, pass_point
from lightning_mcore.errors import CheckpointError

T = TypeVar("T")


class CheckpointGroups(Protocol):
    """The process groups that checkpoints need."""

    @property
    def world_cpu(self) -> dist.ProcessGroup:
        """All ranks, over gloo."""

    @property
    def dp_cp(self) -> dist.ProcessGroup:
        """Ranks that hold copies of the same shards."""


class Steps:
    """The steps of one save or load, each agreed on by the world.

    Args:
        outcome: Begins the message of every error: what did not happen.
        world_cpu: All ranks, over gloo.
    """

    def __init__(self, outcome: str, world_cpu: dist.ProcessGroup) -> None:
        self._outcome = outcome
        self._world_cpu = world_cpu

    def __call__(self, what: str, action: Callable[[], T], *, collective: bool = False) -> T:
        """Runs ``action`` on every rank; if it fails on any, all raise the same error.

        An action that is ``collective`` itself raises CheckpointError on all ranks alike. At any
        other error, ranks may be waiting in it, out of reach: this one raises at once, so that its
        end frees them.
        """
        return self.sharing(what, action, lambda _: None, collective=collective)[0]

    def sharing(
        self,
        what: str,
        action: Callable[[], T],
        share: Callable[[T], Any],
        *,
        collective: bool = False,
    ) -> tuple[T, list[Any]]:
        """The same, with what every rank shares of its result."""
        error: BaseException | None = None
        result: Any = None
        mine: tuple[str | None, Any]
        try:
            if not collective:
                pass_point(what)
            result = action()
            mine = (None, share(result))
        except Exception as caught:
            error = caught
            if collective and not isinstance(caught, CheckpointError):
                text = f"{self._outcome}: {what} failed on rank {dist.get_rank()}: {cause(caught)}"
                raise CheckpointError(text) from caught
            mine = (cause(caught), None)
        everyone: list[Any] = [None] * dist.get_world_size(self._world_cpu)
        try:
            dist.all_gather_object(everyone, mine, group=self._world_cpu)
        except RuntimeError as lost:
            raise CheckpointError(
                f"{self._outcome}: while {what}, another rank was lost ({cause(error or lost)})."
            ) from (error or lost)
        failed: dict[str, list[int]] = {}
        for rank, (text, _) in enumerate(everyone):
            if text is not None:
                failed.setdefault(text, []).append(rank)
        if failed:
            listed = "; ".join(f"{_ranks(ranks)}: {text}" for text, ranks in failed.items())
            raise CheckpointError(f"{self._outcome}: {what} failed on {listed}") from error
        return result, [shared for _, shared in everyone]


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''}"
