"""Runs a function on several ranks of this machine and collects what they return: for tests.

::

    def losses(tp):                      # at module level: ranks import it
        trainer = L.Trainer(accelerator="cpu", devices=2, strategy=MCoreStrategy(tp=tp), ...)
        trainer.fit(Model())
        return float(trainer.callback_metrics["loss"])

    def test_ranks_agree():
        first, second = run_ranks(losses, 2, tp=2)
        assert first == second

Each rank is a process that finds the environment which a launcher would have set, so a Trainer
inside takes it as started from outside. No rank can hang a test: when one fails the others are
killed, and when time is up all are, after saying where they were. What ranks print appears with the
rank in front of each line.

The first call takes the seconds that it takes to import torch, Lightning and megatron-core. They
are imported once, in a server process without threads; ranks are forked from it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import wait
from typing import Any, TypeVar

from lightning_mcore.errors import ConfigurationError, MCoreError
from lightning_mcore.testing._rank import Rank, StartMethod

__all__ = ["RankError", "RankTimeout", "run_ranks"]

Result = TypeVar("Result")
FOREIGN_LAUNCHERS = ("SLURM_", "TORCHELASTIC_", "LSB_", "JSM_", "OMPI_", "PMI_", "GROUP_RANK")
"""Variables by which Lightning would take ranks for those of another launcher."""
GRACE_S = 1.0
"""After the first failure, time for other ranks to fail on their own."""
STACKS_S = 2.0
"""After the time is up, time for ranks to say where they are."""
QUIET_S = 0.5
"""Without another line of a stack, after which it is taken for whole."""


class RankError(MCoreError):
    """A rank raised, was killed, or ended without returning.

    The message holds the traceback of the rank that failed first and the last output of others.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank
        """The rank that failed first."""


class RankTimeout(MCoreError, TimeoutError):
    """Ranks had not finished in time; the message says which, and where they were."""

    def __init__(self, message: str, ranks: list[int]) -> None:
        super().__init__(message)
        self.ranks = ranks
        """The ranks that had not finished."""


def run_ranks(
    fn: Callable[..., Result],
    world_size: int,
    *args: Any,
    timeout_s: float = 120.0,
    env: Mapping[str, str | None] | None = None,
    start_method: StartMethod | None = None,
    **kwargs: Any,
) -> list[Result]:
    """Calls ``fn(*args, **kwargs)`` on each of ``world_size`` ranks and waits for all.

    Ranks get a copy of this process's environment in which ``RANK``, ``LOCAL_RANK``,
    ``WORLD_SIZE``, ``NODE_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT`` (free) are set, and
    ``OMP_NUM_THREADS`` is 1 unless it was set. Changes that a rank makes stay in the rank. Call it
    under ``if __name__ == "__main__":`` in a script.

    Args:
        fn: What each rank calls. A function at module level, because it is pickled by name.
        world_size: Number of ranks, at least 1.
        *args: Passed on, pickled.
        timeout_s: Seconds that all ranks together may take, start included.
        env: Further variables for the ranks; ``None`` removes one.
        start_method: How processes start. ``"forkserver"``, unless given: from a server that has
            imported the engine and touched no GPU. ``"spawn"`` imports everything in each rank;
            ``"fork"`` forks this process, threads and all.
        **kwargs: Passed on, pickled.

    Returns:
        What the ranks returned, in the order of ranks. It is pickled, without shared memory.

    Raises:
        RankError: A rank failed.
        RankTimeout: Not all ranks had finished after ``timeout_s``.
        ConfigurationError: ``world_size`` is not positive, or ``fn`` or an argument has no pickle.
    """
    if world_size < 1:
        raise ConfigurationError(f"`world_size` ({world_size}) must be at least 1; use 1 or more.")
    payload = _pickled(fn, args, kwargs)
    start_s = time.monotonic()
    method = start_method or "forkserver"
    ranks: list[Rank] = []
    with _reserved_port() as port:
        try:
            for rank in range(world_size):
                environment = _environment(rank, world_size, port, env or {})
                ranks.append(Rank(rank, method, payload, environment))
            _watch(ranks, start_s, timeout_s)
        finally:
            for started in ranks:
                started.end()
    return [pickle.loads(rank.result) for rank in ranks]


def _pickled(fn: Callable[..., Any], args: Any, kwargs: Any) -> bytes:
    try:
        return pickle.dumps((fn, args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigurationError(
            f"Ranks import `fn` ({getattr(fn, '__qualname__', fn)}) by name and get its arguments"
            f" pickled, which failed ({error}); define `fn` at the level of a module and pass plain"
            " values."
        ) from error


# ----------------------------------------------------------------------- environment


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    """A port that nobody else is given meanwhile, and rank 0 can listen on.

    A socket that is bound keeps the port from others; as long as it does not listen itself, one
    that reuses addresses may. Bound to all addresses, as rank 0 will be: NCCL may listen on the
    same port of another address.
    """
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("", 0))
        yield reserved.getsockname()[1]


def _environment(
    rank: int, world_size: int, port: int, changes: Mapping[str, str | None]
) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN_LAUNCHERS)}
    wanted: dict[str, str | None] = {
        "OMP_NUM_THREADS": "1",
        **inherited,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        **changes,
    }
    return {name: value for name, value in wanted.items() if value is not None}


def _watch(ranks: list[Rank], start_s: float, timeout_s: float) -> None:
    """Follows the ranks until all have ended, one has failed, or the time is up."""
    deadline_s = start_s + timeout_s
    while any(rank.running for rank in ranks):
        if not _receive(ranks, deadline_s):
            break
        if any(rank.failure for rank in ranks):
            grace_s = min(deadline_s, time.monotonic() + GRACE_S)
            while any(rank.running for rank in ranks) and _receive(ranks, grace_s):
                pass
            break
    if any(rank.failure for rank in ranks):
        raise _rank_error(ranks, start_s)
    if any(rank.running for rank in ranks):
        raise _rank_timeout(ranks, timeout_s)


def _receive(ranks: list[Rank], until_s: float) -> bool:
    """Waits for news and takes them in; returns whether there was time left."""
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        return False
    ready = set(wait([end for rank in ranks for end in rank.open_ends()], left_s))
    for rank in ranks:
        rank.receive(ready)
    return True


def _receive_stacks(ranks: list[Rank], late: list[Rank]) -> None:
    """Waits for stacks, which faulthandler writes line by line and does not end: for silence."""
    until_s = quiet_s = time.monotonic() + STACKS_S
    lengths: list[int] = []
    while _receive(ranks, quiet_s):
        before, lengths = lengths, [len(rank.stack) for rank in late]
        if all(lengths) and lengths != before:
            quiet_s = min(until_s, time.monotonic() + QUIET_S)


def _rank_error(ranks: list[Rank], start_s: float) -> RankError:
    # A death is noticed after the errors that it causes in others, and reported as none of them.
    head_start_s = GRACE_S / 2
    failed = sorted(
        (rank for rank in ranks if rank.failed_s is not None),
        key=lambda rank: (rank.failed_s or 0.0) - head_start_s * rank.died,
    )
    first = failed[0]
    after_s = (first.failed_s or start_s) - start_s
    parts = [f"rank {first.rank} of {len(ranks)} failed first, after {after_s:.2f} s:"]
    parts.append(first.failure.strip("\n"))
    for rank in failed[1:]:
        parts.append(f"rank {rank.rank} failed later: {rank.failure.strip().splitlines()[-1]}")
    for rank in ranks:
        if rank.last_lines and (rank is not first or rank.died):
            parts.append("\n".join([f"last output of rank {rank.rank}:", *rank.last_lines]))
    return RankError("\n\n".join(parts), first.rank)


def _rank_timeout(ranks: list[Rank], timeout_s: float) -> RankTimeout:
    late = [rank for rank in ranks if rank.running]
    for rank in late:
        rank.ask_for_stack()
    _receive_stacks(ranks, late)
    numbers = [rank.rank for rank in late]
    parts = [f"ranks {numbers} of {len(ranks)} had not finished after {timeout_s:g} s."]
    for rank in late:
        returned = " had returned, but not ended," if rank.result else ""
        stack = rank.stack.decode(errors="replace").strip() or "(no answer; it may not have begun)"
        parts.append(f"rank {rank.rank}{returned} was here (most recent call first):\n{stack}")
    for rank in ranks:
        if rank.last_lines:
            parts.append("\n".join([f"last output of rank {rank.rank}:", *rank.last_lines]))
    return RankTimeout("\n\n".join(parts), numbers)
