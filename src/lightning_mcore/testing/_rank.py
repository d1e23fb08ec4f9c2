"""One rank: the process, and what its caller sees of it."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterator, Mapping
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Literal

import torch

from lightning_mcore import _lightning

StartMethod = Literal["forkserver", "spawn", "fork"]

PRELOADED = (
    "lightning_mcore.testing",
    "lightning_mcore",
    "lightning.pytorch",
    "megatron.core.models.gpt",
    "megatron.core.models.gpt.gpt_layer_specs",
    "lightning_mcore.testing._gpu_layers",
)
STACK_SIGNAL = signal.SIGUSR2
LAST_LINES = 20


# ----------------------------------------------------------------------- environment


@contextlib.contextmanager
def _environ(environment: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    _set_environ(environment)
    try:
        yield
    finally:
        _set_environ(before)


def _set_environ(environment: Mapping[str, str]) -> None:
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)


def _start_server(environment: Mapping[str, str]) -> None:
    """Starts the process that ranks are forked from, once; it is gone when this process is.

    It knows neither ``sys.path`` nor the environment of later calls: ranks set them. The number of
    threads is settled when libraries are loaded, so it must be there already.
    """
    # Tests import pytest, which each rank would do again.
    tools = [name for name in ("pytest",) if name in sys.modules]
    multiprocessing.set_forkserver_preload([*PRELOADED, *tools])
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    # The engine's warnings about missing GPU extensions would appear with the first test.
    quiet = "ignore:Apex is not installed,ignore:Transformer Engine and Apex are not installed"
    warnings = ",".join(filter(None, (quiet, environment.get("PYTHONWARNINGS"))))
    # Imports look for GPUs. Asking CUDA itself would make it unusable in ranks; NVML does not.
    added = {
        "PYTHONPATH": path,
        "PYTHONWARNINGS": warnings,
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }
    with _environ({**environment, **added}):
        forkserver.ensure_running()


# ----------------------------------------------------------------------- in the rank


def _rank_main(
    payload: bytes,
    rank: int,
    environment: dict[str, str],
    result: Connection,
    output: Connection,
    stacks: Connection,
) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: do not outlive the parent.
    os.setpgid(0, 0)  # What the rank starts is killed with it.
    for number in (1, 2):
        os.dup2(output.fileno(), number)
    output.close()
    sys.stdout = _unbuffered(1)
    sys.stderr = _unbuffered(2)
    faulthandler.enable(2)
    faulthandler.register(STACK_SIGNAL, stacks.fileno(), all_threads=True)
    _set_environ(environment)
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))
    _lightning.set_rank_zero(rank)
    try:
        fn, args, kwargs = pickle.loads(payload)
        result.send_bytes(pickle.dumps((True, pickle.dumps(fn(*args, **kwargs)))))
    except BaseException as error:
        failed_s = time.monotonic()
        frames = error.__traceback__ and error.__traceback__.tb_next
        text = "".join(traceback.format_exception(type(error), error, frames))
        result.send_bytes(pickle.dumps((False, (failed_s, text))))
        raise SystemExit(1) from None


def _unbuffered(number: int) -> io.TextIOWrapper:
    return open(number, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)


# ----------------------------------------------------------------------- in the caller


class Rank:
    """A rank seen from the caller: its process, what it has said so far, how it ended."""

    def __init__(
        self, rank: int, method: StartMethod, payload: bytes, environment: dict[str, str]
    ) -> None:
        self.rank = rank
        self.result = b""
        self.failed_s: float | None = None
        self.failure = ""
        self.died = False
        self.running = True
        self.stack = b""
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._line = b""
        if method == "forkserver":
            _start_server(environment)
        context = multiprocessing.get_context(method)
        pipes = [context.Pipe(duplex=False) for _ in range(3)]
        self._result, self._output, self._stacks = (mine for mine, _ in pipes)
        theirs = [end for _, end in pipes]
        self._process: BaseProcess = context.Process(  # type: ignore[attr-defined]
            target=_rank_main, args=(payload, rank, environment, *theirs), name=f"rank {rank}"
        )
        with _environ(environment):
            self._process.start()
        for end in theirs:
            end.close()

    def open_ends(self) -> list[Any]:
        """What becomes ready when the rank says something or ends."""
        pipes = [p for p in (self._result, self._output, self._stacks) if not p.closed]
        return [*pipes, self._process.sentinel] if self.running else pipes

    def receive(self, ready: set[Any]) -> None:
        """Takes in what is ready; of a rank that ended, all there is."""
        ended = self.running and self._process.sentinel in ready
        if ended:
            self._process.join()
            self.kill()
        for pipe, take in (
            (self._result, self._take_result),
            (self._output, self._take_output),
            (self._stacks, self._take_stack),
        ):
            while not pipe.closed and (pipe in ready or (ended and pipe.poll())):
                ready.discard(pipe)
                take()
        if ended:
            self.running = False
            self._judge()

    def _take_result(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            returned, content = pickle.loads(self._result.recv_bytes())
            if returned:
                self.result = content
            else:
                self.failed_s, self.failure = content
        self._result.close()

    def _take_output(self) -> None:
        *lines, self._line = (self._line + _read(self._output)).split(b"\n")
        for line in lines:
            self._print(line)

    def _take_stack(self) -> None:
        self.stack += _read(self._stacks)

    def _print(self, line: bytes) -> None:
        # Of a progress bar, what a terminal would show.
        text = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
        text = f"[rank {self.rank}] {text}"
        self.last_lines.append(text)
        print(text, flush=True)

    def _judge(self) -> None:
        if self._line:
            self._print(self._line)
        code = self._process.exitcode or 0
        if not self.failure and (code != 0 or not self.result):
            self.died = True
            self.failed_s = time.monotonic()
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            self.failure = f"It ended by itself ({how}), without returning or raising.\n"

    def ask_for_stack(self) -> None:
        """Makes the rank say where each of its threads is."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid or 0, STACK_SIGNAL)

    def kill(self) -> None:
        """Ends the rank and the processes that it started, now."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._process.kill()

    def end(self) -> None:
        """Leaves nothing behind."""
        if self.running:
            self.kill()
            self._process.join()
        self._process.close()
        for pipe in (self._result, self._output, self._stacks):
            pipe.close()


def _read(pipe: Connection) -> bytes:
    data = os.read(pipe.fileno(), 1 << 16)
    if not data:
        pipe.close()
    return data
