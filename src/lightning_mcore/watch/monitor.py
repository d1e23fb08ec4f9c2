"""One rank's monitor: tells others of this rank, and ends it when another has failed."""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Literal

import torch.distributed as dist

from lightning_mcore.errors import RankFailed
from lightning_mcore.watch.hub import REPORT_S, Connection, Hub
from lightning_mcore.watch.progress import Progress
from lightning_mcore.watch.records import Failure
from lightning_mcore.watch.stacks import stack_of, unfinished_on_device, waiting_in

EXIT_CODE = 75
"""Of a process that could not leave a collective by itself: EX_TEMPFAIL, try again later."""
_ABORT_S = 10.0
"""How long an abort of NCCL may take."""


class Monitor(threading.Thread):
    """Watches this rank for others, and others for this rank. Made by the main thread of a rank.

    Args:
        address: Host of rank 0.
        port: Where its hub listens.
        token: What the hub wants to hear first.
        where_zero: Coordinates of rank 0.
        rank: Of this process.
        where: This rank's coordinates, in words.
        progress: Written by the main thread.
        groups: This rank's process groups by name, for reports; may be filled later.
        lost_after_s: Silence after which the hub counts as lost.
        hang_after_s: Time without progress after which the run is taken to hang.
        is_running: Whether the thread with this id is still inside the Trainer.
        print_at_once: Whether a launcher may kill this process before its exception is shown.
        hub: In rank 0's process.
    """

    def __init__(
        self,
        address: str,
        port: int,
        token: str,
        where_zero: str,
        *,
        rank: int,
        where: str,
        progress: Progress,
        groups: Mapping[str, Any],
        lost_after_s: float,
        hang_after_s: float,
        is_running: Callable[[int], bool],
        print_at_once: bool = False,
        hub: Hub | None = None,
    ) -> None:
        super().__init__(name="mcore-failure-monitor", daemon=True)
        self._rank, self._where, self._progress, self._groups = rank, where, progress, groups
        self._lost_after_s, self._hang_after_s = lost_after_s, hang_after_s
        self._leave_s = min(5.0, lost_after_s / 2)
        self._where_zero, self._status_zero = where_zero, Progress().status()
        self._is_running = is_running
        self._print_at_once = print_at_once
        self._hub = hub
        self._main = threading.get_ident()
        self._failure: Failure | None = None
        self._known = threading.Event()
        self._everyone = threading.Event()
        self._closed = threading.Event()
        self._aborted = False
        self._connection = Connection(socket.create_connection((address, port), timeout=30.0))
        self._connection.send(t="hello", token=token, rank=rank, where=where)

    def judge(self, error: BaseException) -> BaseException:
        """What the main thread shall raise for ``error``: that itself, or what caused it elsewhere.

        An error of a collective is the consequence of a failure of another rank if one is found.
        """
        if isinstance(error, RankFailed):
            return error
        caused = self._aborted or is_communication_error(error)
        text = "".join(traceback.format_exception(error))
        kind: Literal["communication", "raised"] = "communication" if caused else "raised"
        failure = Failure(kind, self._rank, self._where, self._progress.status(), text)
        self._connection.send(t="fail", failure=failure.as_dict())
        if caused and self._known.wait(self._leave_s + REPORT_S):
            assert self._failure is not None
            if self._failure.rank != self._rank or self._failure.kind == "hang":
                reason = str(error).partition("\n")[0]
                return RankFailed(
                    f"{self._message(self._failure)}\nThis rank ({self._where}) stopped at:"
                    f" {type(error).__name__}: {reason}",
                    self._failure.rank,
                )
        return error

    def close(self) -> None:
        """Leaves properly: others are not alarmed."""
        self._closed.set()
        if self._hub is not None:
            self._hub.closing.set()
        self._connection.send(t="bye")
        with suppress(OSError):
            # Wakes this thread at once.
            self._connection.sock.shutdown(socket.SHUT_RD)
        self.join(timeout=1.0)
        if self._hub is not None:
            self._hub.close()

    def run(self) -> None:
        """Tells and listens until closed, or until this process is ended."""
        interval_s = min(1.0, self._lost_after_s / 8)
        heard_s = moved_s = time.monotonic()
        beat_s, count, asked = 0.0, -1, False
        while not self._closed.is_set() and self._failure is None:
            ready = _has_news(self._connection.sock, interval_s / 4)
            now_s = time.monotonic()
            if ready:
                heard_s = now_s
                if not self._hear():
                    break
            elif now_s - heard_s > self._lost_after_s:
                self._learn(self._of_zero("lost", now_s - heard_s))
            if self._progress.count != count:
                count, moved_s, asked = self._progress.count, now_s, False
            elif now_s - moved_s > self._hang_after_s and not asked:
                asked = True
                stuck = Failure(
                    "hang",
                    self._rank,
                    self._where,
                    self._progress.status(),
                    quiet_s=now_s - moved_s,
                )
                self._connection.send(t="stuck", failure=stuck.as_dict())
            if now_s - beat_s > interval_s:
                beat_s = now_s
                self._connection.send(t="beat", status=self._progress.status())
        if self._failure is not None and not self._closed.is_set():
            self._end(self._failure)
        self._connection.sock.close()

    def _hear(self) -> bool:
        messages = self._connection.receive()
        if messages is None:
            if not self._closed.is_set():
                self._learn(self._of_zero("died"))
            return self._failure is not None
        for message in messages:
            if message["t"] == "ping":
                self._status_zero = message["status"]
            elif message["t"] == "ask":
                self._connection.send(t="report", report=self._report())
            elif message["t"] == "failed":
                self._learn(Failure(**message["failure"]))
            elif message["t"] == "everyone":
                self._everyone.set()
            elif message["t"] == "bye":
                return False
        return True

    def _of_zero(self, kind: Literal["died", "lost"], quiet_s: float = 0.0) -> Failure:
        """The end of the rank that the hub lives on."""
        return Failure(kind, 0, self._where_zero, self._status_zero, quiet_s=quiet_s)

    def _learn(self, failure: Failure) -> None:
        if self._failure is None:
            self._failure = failure
            self._known.set()

    def _report(self) -> dict[str, Any]:
        wait = None
        # Frames of a running thread may change under our eyes.
        with suppress(Exception):
            wait = waiting_in(self._main, self._groups)
        on_device: list[str] = []
        with suppress(Exception):
            on_device = unfinished_on_device()
        return {
            "where": self._where,
            "status": self._progress.status(),
            "wait": wait,
            "on_device": on_device,
            "stack": stack_of(self._main),
        }

    def _message(self, failure: Failure) -> str:
        return f"{failure.message()}\n\n{self._progress.resume_hint()}"

    def _end(self, failure: Failure) -> None:
        """Gives the main thread time to leave, then help, then ends the process."""
        message = self._message(failure)
        if self._print_at_once and failure.rank != self._rank:
            self._print(message)
        # Most collectives end by themselves: gloo's when the other process closes its sockets.
        if self._left(self._leave_s / 2):
            return
        if failure.kind != "raised" or failure.rank != self._rank:
            self._abort_collectives()
        if self._left(self._leave_s / 2):
            return
        self._print(
            f"{message}\n\nThis rank could not leave what it was doing by itself, and ends with"
            f" exit code {EXIT_CODE}; it was here (most recent call last):\n{stack_of(self._main)}"
        )
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(EXIT_CODE)

    def _left(self, within_s: float) -> bool:
        """Whether the main thread leaves the Trainer in time, or every rank raised of itself."""
        until_s = time.monotonic() + within_s
        while time.monotonic() < until_s:
            if self._closed.wait(0.05) or not self._is_running(self._main):
                return True
            if self._progress.is_finishing:
                return True
            with suppress(OSError, ValueError):
                if _has_news(self._connection.sock, 0.0):
                    for message in self._connection.receive() or ():
                        if message["t"] == "everyone":
                            self._everyone.set()
            if self._everyone.is_set():
                return True
        return False

    def _abort_collectives(self) -> None:
        """Makes NCCL's collectives return.

        Gloo's cannot be ended from outside: abort() of its process group changes nothing for a
        waiting thread (torch 2.11 and 2.13).
        """
        if dist.is_initialized() and "nccl" in str(dist.get_backend()):
            self._aborted = True
            # NCCL waits for CUDA graphs that hold its kernels to go, which may be never.
            abort = threading.Thread(target=_abort_process_group, daemon=True)
            abort.start()
            abort.join(_ABORT_S)

    def _print(self, message: str) -> None:
        lines = "".join(f"[rank {self._rank}] {line}\n" for line in message.splitlines())
        with suppress(OSError):
            os.write(2, lines.encode(errors="replace"))


def _abort_process_group() -> None:
    with suppress(Exception):
        dist.distributed_c10d._abort_process_group()


def _has_news(sock: socket.socket, timeout_s: float) -> bool:
    """Whether there is something to receive, the end of the connection included.

    Not ``select.select``, which takes no descriptor above 1023: groups and loaders of a long job
    can hold more.
    """
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def is_communication_error(error: BaseException) -> bool:
    """Whether an error, or what it came from, was raised by a collective."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if isinstance(current, dist.DistError) or (
            type(current) is RuntimeError and _mentions_transport(str(current))
        ):
            return True
        if isinstance(current, (RuntimeError, ValueError)) and _from_distributed(current):
            return True
        current = current.__cause__ or current.__context__
    return False


def _mentions_transport(text: str) -> bool:
    marks = (
        "gloo",
        "NCCL",
        "Connection closed by peer",
        "Connection reset",
        "ProcessGroup",
        "c10d",
    )
    return any(mark in text for mark in marks)


def _from_distributed(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and "torch/distributed/" in frames[-1].filename.replace("\\", "/")
