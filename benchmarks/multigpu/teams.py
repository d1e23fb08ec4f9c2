"""Teams of rank processes that wait for calls, so that several can take turns on the same GPUs.

A process can set up TransformerEngine's userbuffers once, and hold one MCoreStrategy at a time. So
every case has a team of its own, and the main process says whose turn it is: a rank that waits for
a call waits on a pipe, and leaves the GPU alone.

Importing torch, TransformerEngine and the engine takes half a minute, so it is done once, in the
main process, and teams are forked from it. That needs a main process that never touches CUDA;
``start_method`` tries it out on a process of its own and falls back to spawning.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

STACKS = signal.SIGUSR1
"""A rank that gets it writes to stderr where each of its threads is."""
_END_S = 5.0
"""What ranks get to end by themselves."""


class TeamError(Exception):
    """A call failed on some ranks.

    Args:
        errors: By rank, what happened; ranks that returned are missing.
        refused: Whether all ranks raised the same ConfigurationError, so that they are still in
            step with each other.
    """

    def __init__(self, errors: Mapping[int, str], *, refused: bool = False) -> None:
        super().__init__("; ".join(f"rank {rank}: {text}" for rank, text in errors.items()))
        self.errors = dict(errors)
        self.refused = refused


class Team:
    """``world`` processes, each of which does what ``call`` asks for.

    Args:
        name: For messages.
        world: Number of ranks; rank ``i`` is to use GPU ``i``.
        method: ``"fork"`` or ``"spawn"``.
        environment: Further variables, set before the ranks touch CUDA.
    """

    def __init__(
        self, name: str, world: int, method: str, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        # Keeps the port from others; rank 0 may listen on it as long as this socket does not. Bound
        # to all addresses, as rank 0 will be: NCCL may listen on the same port of another one.
        self._port = socket.socket()
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port.bind(("", 0))
        context: Any = multiprocessing.get_context(method)
        self._processes, self._pipes = [], []
        for rank in range(world):
            mine, theirs = context.Pipe()
            variables = {
                **(environment or {}),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "NODE_RANK": "0",
                "WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._port.getsockname()[1]),
            }
            process = context.Process(target=_serve, args=(theirs, variables, os.getpid()))
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(mine)
        self._due: list[Connection] = []

    def send(self, function: Callable[..., Any], *args: Any) -> None:
        """Makes every rank call a module-level function; ``receive`` waits for it."""
        self._due = list(self._pipes)
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # receive finds the rank dead
                pipe.send((function, args))

    def receive(self, limit_s: float) -> list[Any]:
        """What the ranks returned.

        Raises:
            TeamError: If one raised or died, or took more than ``limit_s``. Unless all refused
                alike, the team is over: the ranks may be out of step.
        """
        end = time.monotonic() + limit_s
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        kinds: set[Any] = set()
        while self._due:
            # Others wait in a collective for the one that failed: they get a moment to say so.
            left = min(end, time.monotonic() + _END_S) if errors else end
            ready: Any = wait(self._due, max(0.0, left - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = self._pipes.index(pipe)
                self._due.remove(pipe)
                try:
                    kind, value = pipe.recv()
                except (EOFError, OSError):
                    kind, value = "died", f"ended by itself ({self._exit_code(rank)})"
                if kind == "returned":
                    results[rank] = value
                else:
                    errors[rank] = value
                    kinds.add((kind, value.splitlines()[0]))
        still = "waited for a rank that failed" if errors else f"took over {limit_s:.0f} s"
        for pipe in self._due:
            rank = self._pipes.index(pipe)
            errors[rank] = still
            self._ask_for_stacks(rank)
        if errors:
            # A rank that gave no answer has not refused: it waits for those that did.
            answered = not self._due and len(errors) == len(self._pipes)
            refused = answered and len(kinds) == 1 and {k for k, _ in kinds} == {"refused"}
            if not refused:
                time.sleep(0.5 if self._due else 0.0)
                self.kill()
            raise TeamError(errors, refused=refused)
        return [results[rank] for rank in range(len(self._pipes))]

    def call(self, function: Callable[..., Any], *args: Any, limit_s: float) -> list[Any]:
        """``send`` and ``receive``."""
        self.send(function, *args)
        return self.receive(limit_s)

    @property
    def alive(self) -> bool:
        """Whether all ranks are there."""
        return all(process.is_alive() for process in self._processes)

    def end(self) -> None:
        """Lets the ranks exit, and kills those that do not."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        end = time.monotonic() + _END_S
        for process in self._processes:
            process.join(max(0.0, end - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Ends the ranks now."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._port.close()

    def _exit_code(self, rank: int) -> str:
        self._processes[rank].join(1.0)
        return f"exit code {self._processes[rank].exitcode}"

    def _ask_for_stacks(self, rank: int) -> None:
        pid = self._processes[rank].pid
        if pid is not None and self._processes[rank].is_alive():
            print(f"Stacks of {self.name}, rank {rank}, follow.", file=sys.stderr, flush=True)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, STACKS)


def _serve(pipe: Connection, variables: Mapping[str, str], parent: int) -> None:
    """Calls what comes through the pipe until there is nothing more."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: do not outlive the parent.
        if os.getppid() != parent:
            os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent ends this process.
    os.environ.update(variables)
    faulthandler.enable()
    faulthandler.register(STACKS, all_threads=True)
    while True:
        try:
            message = pipe.recv()
        except EOFError:
            message = None
        if message is None:
            break
        function, args = message
        try:
            reply = ("returned", function(*args))
        except BaseException as error:
            reply = (_kind(error), _text(error))
        pipe.send(reply)
    sys.stdout.flush()
    sys.stderr.flush()
    # Without the destructors of communicators, which wait for other ranks.
    os._exit(0)


def _kind(error: BaseException) -> str:
    return "refused" if type(error).__name__ == "ConfigurationError" else "raised"


def _text(error: BaseException) -> str:
    """The error, then where it came from."""
    lines = traceback.format_exception_only(error)
    where = traceback.format_tb(error.__traceback__)[-6:]
    return "".join([*lines, *where]).strip()


def start_method(probe: Callable[[], Any], limit_s: float = 60.0) -> str:
    """``"fork"`` if a process forked from this one can call ``probe``, else ``"spawn"``.

    Args:
        probe: Touches the GPU.
        limit_s: For the attempt.
    """
    team = Team("probe", 1, "fork")
    try:
        team.call(probe, limit_s=limit_s)
    except TeamError as error:
        print(f"Ranks cannot be forked, and are spawned: {error}", flush=True)
        return "spawn"
    else:
        team.end()
        return "fork"
