"""Runs many small trainings whose ranks fail, in processes that are forked and watched one by one.

``run_ranks`` ends the other ranks soon after the first failure; here they must end by themselves.
Each rank of one ``run_ranks`` call is a supervisor that forks a child per case: the imports of
torch and the engine are paid for once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_mcore.testing import _reserved_port, run_ranks

KILL_AFTER_S = 40.0
"""A child that takes longer hangs."""


@dataclass(frozen=True)
class Outcome:
    """How a child ended."""

    status: int
    """Exit code, or minus the signal."""
    ended_s: float
    """On the clock that all processes of a machine share."""
    output: str


def supervise(
    function: Callable[..., Any], cases: Sequence[Any], ports: Sequence[int], limit_s: float
) -> list[Outcome]:
    """Runs ``function(case)`` for each case as this rank, each time in a new process."""
    outcomes = []
    for case, port in zip(cases, ports, strict=True):
        with tempfile.TemporaryFile() as file:
            child = os.fork()
            if child == 0:
                _child(function, case, port, file.fileno())
            status, ended_s = _wait(child, limit_s)
            file.seek(0)
            outcomes.append(Outcome(status, ended_s, file.read().decode(errors="replace")))
    return outcomes


def _child(function: Callable[..., Any], case: Any, port: int, output: int) -> None:
    code = 1
    try:
        os.environ["MASTER_PORT"] = str(port)
        os.dup2(output, 1)
        os.dup2(output, 2)
        function(case)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
        print(f"SystemExit {end.code}", flush=True)
    except BaseException as error:
        traceback.print_exc()
        print(f"RAISED {type(error).__name__}", flush=True)
    finally:
        os._exit(code)


def _wait(child: int, limit_s: float) -> tuple[int, float]:
    until_s = time.monotonic() + limit_s
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status), time.monotonic()
        if time.monotonic() > until_s:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return -999, time.monotonic()
        time.sleep(0.01)


def run_failing(
    function: Callable[..., Any],
    world_size: int,
    cases: Sequence[Any],
    *,
    limit_s: float = KILL_AFTER_S,
    env: dict[str, str] | None = None,
) -> list[list[Outcome]]:
    """Outcomes by case, then by rank."""
    with contextlib.ExitStack() as reserved:
        ports = [reserved.enter_context(_reserved_port()) for _ in cases]
        by_rank = run_ranks(
            supervise, world_size, function, cases, ports, limit_s, timeout_s=280.0, env=env
        )
    return [[outcomes[i] for outcomes in by_rank] for i in range(len(cases))]
