"""The meeting point of all ranks' monitors, a thread in rank 0's process.

It hears every rank's signs of life over one TCP connection each, decides who failed first, and
tells all ranks once. The end of a process closes its connection, so a death shows at once.
"""

from __future__ import annotations

import json
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from lightning_mcore.watch.records import Failure, hang_report

TICK_S = 0.1
FIRST_S = 0.3
"""After a failure, time in which others may report one that came first or at the same time."""
CAUSE_S = 1.5
"""After a failed collective, time in which its cause may show elsewhere."""
REPORT_S = 3.0
"""Time for ranks to say where they are."""


class Connection:
    """Messages in JSON, one a line, over a socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(0.5)
        # A message counts more than a full packet.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self._buffer = b""
        self._lock = threading.Lock()

    def send(self, **message: Any) -> bool:
        """Sends, from any thread; returns whether that worked."""
        with self._lock, suppress(OSError):
            self.sock.sendall(json.dumps(message).encode() + b"\n")
            return True
        return False

    def receive(self) -> list[dict[str, Any]] | None:
        """Whole messages that have arrived; ``None`` once the other side has closed."""
        try:
            data = self.sock.recv(1 << 16)
        except TimeoutError:
            return []
        except OSError:
            return None
        if not data:
            return None
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [json.loads(line) for line in lines if line]


class _Member:
    """What the hub knows of one rank."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.rank: int | None = None
        self.where = ""
        self.status: Mapping[str, Any] = {}
        self.heard_s = time.monotonic()


class Hub(threading.Thread):
    """Hears all ranks and tells them the first failure.

    Args:
        address: Host name or address by which other ranks reach this process.
        token: What ranks must say first: others may not join.
        lost_after_s: Silence after which a rank counts as lost.
        status: Where the rank of this process is; told to others, who cannot ask once it is dead.
    """

    def __init__(
        self,
        address: str,
        token: str,
        lost_after_s: float,
        status: Callable[[], dict[str, Any]],
    ) -> None:
        super().__init__(name="mcore-failure-hub", daemon=True)
        self._token = token
        self._status = status
        self._lost_after_s = lost_after_s
        self._listener = _listen(address)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._members: dict[Connection, _Member] = {}
        self._failures: dict[int, Failure] = {}
        self._decide_s: float | None = None
        self._reports: dict[int, dict[str, Any]] | None = None
        self._stuck: Failure | None = None
        self._told = False
        self._told_everyone = False
        self.closing = threading.Event()
        """Set before ``close``: the next message that arrives ends the thread."""

    def close(self) -> None:
        """Ends the thread once all ranks have left or been told what happened."""
        self.closing.set()
        self.join(timeout=2.0)

    def run(self) -> None:
        """Serves until closed."""
        pinged_s = 0.0
        until_s: float | None = None
        while True:
            for key, _ in self._selector.select(TICK_S):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._hear(key.data)
            now_s = time.monotonic()
            if now_s - pinged_s > min(1.0, self._lost_after_s / 8):
                pinged_s = now_s
                self._tell(t="ping", status=self._status())
            self._look_for_lost(now_s)
            self._decide(now_s)
            if self.closing.is_set():
                until_s = until_s or now_s + 1.0
                if not self._members or (self._decide_s is None and not self._told):
                    break
                if now_s > until_s:
                    break
        self._tell(t="bye")
        for connection in list(self._members):
            self._drop(connection, linger=True)
        self._selector.close()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            sock, _ = self._listener.accept()
            member = _Member(Connection(sock))
            self._members[member.connection] = member
            self._selector.register(sock, selectors.EVENT_READ, member)

    def _hear(self, member: _Member) -> None:
        try:
            messages = member.connection.receive()
        except ValueError:  # Not one of ours.
            messages = None
        if messages is None:
            self._drop(member.connection)
            if member.rank is not None:
                self._note(Failure("died", member.rank, member.where, member.status))
            return
        member.heard_s = time.monotonic()
        for message in messages:
            if member.rank is None and message.get("token") != self._token:
                self._drop(member.connection)
                return
            self._handlers[message["t"]](self, member, message)

    def _on_hello(self, member: _Member, message: dict[str, Any]) -> None:
        member.rank, member.where = int(message["rank"]), str(message["where"])

    def _on_beat(self, member: _Member, message: dict[str, Any]) -> None:
        member.status = message["status"]

    def _on_fail(self, member: _Member, message: dict[str, Any]) -> None:
        self._note(Failure(**message["failure"]))

    def _on_stuck(self, member: _Member, message: dict[str, Any]) -> None:
        if self._reports is None and not self._failures:
            self._reports = {}
            self._stuck = Failure(**message["failure"])
            self._decide_s = time.monotonic() + REPORT_S
            self._tell(t="ask")

    def _on_report(self, member: _Member, message: dict[str, Any]) -> None:
        if self._reports is not None and member.rank is not None:
            self._reports[member.rank] = message["report"]

    def _on_bye(self, member: _Member, message: dict[str, Any]) -> None:
        self._drop(member.connection)

    _handlers: Mapping[str, Callable[[Hub, _Member, dict[str, Any]], None]] = {
        "hello": _on_hello,
        "beat": _on_beat,
        "fail": _on_fail,
        "stuck": _on_stuck,
        "report": _on_report,
        "bye": _on_bye,
    }

    def _look_for_lost(self, now_s: float) -> None:
        for member in list(self._members.values()):
            quiet_s = now_s - member.heard_s
            if quiet_s > self._lost_after_s and member.rank is not None:
                self._note(
                    Failure("lost", member.rank, member.where, member.status, quiet_s=quiet_s)
                )

    def _note(self, failure: Failure) -> None:
        # What a rank raised says more than that its process then ended.
        if failure.rank in self._failures:
            return
        self._failures[failure.rank] = failure
        wait_s = CAUSE_S if failure.kind == "communication" else FIRST_S
        due_s = time.monotonic() + wait_s
        self._decide_s = due_s if self._decide_s is None else min(self._decide_s, due_s)

    def _decide(self, now_s: float) -> None:
        ranks = {member.rank for member in self._members.values() if member.rank is not None}
        own = {rank for rank, f in self._failures.items() if f.kind == "raised"}
        if self._told:
            if ranks and ranks <= own and not self._told_everyone:
                self._told_everyone = self._tell(t="everyone")
            return
        answered = self._reports is not None and set(self._reports) >= ranks
        if self._decide_s is None or (now_s < self._decide_s and not (answered and self._stuck)):
            return
        causes = [f for f in self._failures.values() if f.kind != "communication"]
        first = next(iter(causes or self._failures.values()), None)
        if first is None:
            assert self._stuck is not None, "something made a decision due"
            reports = self._reports or {}
            silent = sorted(ranks - set(reports))
            first = Failure(
                "hang",
                self._stuck.rank,
                self._stuck.where,
                self._stuck.status,
                hang_report(reports, silent),
                self._stuck.quiet_s,
            )
        self._told = self._tell(t="failed", failure=first.as_dict())
        self._told_everyone = bool(ranks) and ranks <= own and self._tell(t="everyone")

    def _tell(self, **message: Any) -> bool:
        for connection, member in list(self._members.items()):
            if member.rank is not None:
                connection.send(**message)
        return True

    def _drop(self, connection: Connection, *, linger: bool = False) -> None:
        self._members.pop(connection, None)
        with suppress(OSError, KeyError, ValueError):
            self._selector.unregister(connection.sock)
        with suppress(OSError):
            if linger:
                # Closing with unread data would reset the connection and lose what was sent.
                connection.sock.shutdown(socket.SHUT_WR)
                while connection.sock.recv(1 << 16):
                    pass
        connection.sock.close()


def _listen(address: str) -> socket.socket:
    """A listening socket at a free port of the address, or of all if it is not of this host."""
    for host in (address, ""):
        with suppress(OSError):
            family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0] if host else None
            return socket.create_server((host, 0), family=family or socket.AF_INET, backlog=1024)
    raise OSError(f"no free port at {address!r} for the failure channel")
