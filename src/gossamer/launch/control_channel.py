"""The control connections between the supervisors of all hosts: rank positions, failures, stop requests, the end.

They are open as long as the run. Host 0 is the hub; every other host has one connection, to host 0. A run on one host
is a hub without connections.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Mapping
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, TypeAdapter

from gossamer.launch.failure_report import RankFailure
from gossamer.process.event_loop import EventLoop
from gossamer.process.json_lines import JsonLineReader, Said, read_line, write_line
from gossamer.spec.errors import WireMismatch

How = Literal["save", "now"]


class RankPosition(Said):
    """The last known position of a rank, as its supervisor sends it to other hosts: ages instead of times."""

    rank: int
    pid: int
    step: int
    phase: str
    op: str
    sequence: int
    first_step: int
    still_s: float  # seconds without progress
    longest_s: float
    finished: bool
    waits: bool
    place: str


class HostAlive(Said):
    """A supervisor's heartbeat to the other hosts, with the last position of each of its ranks."""

    kind: Literal["alive"] = "alive"
    standings: tuple[RankPosition, ...]


class RankFailed(Said):
    """A message that reports the failure of one rank."""

    kind: Literal["failed"] = "failed"
    failure: RankFailure


class Stop(Said):
    """A request to stop the run: `save` lets the workers save a checkpoint first, `now` kills them."""

    kind: Literal["stop"] = "stop"
    how: How


class Done(Said):
    """A message that all workers of a host have ended, with their exit codes."""

    kind: Literal["done"] = "done"
    exit_codes: tuple[int, ...]


class RunEnded(Said):
    """Host 0's last message, the same for all hosts: exit code of the run and text for the user."""

    kind: Literal["ended"] = "ended"
    exit_code: int
    text: str


Control: TypeAlias = Annotated[HostAlive | RankFailed | Stop | Done | RunEnded, Field(discriminator="kind")]
_CONTROL: TypeAdapter[HostAlive | RankFailed | Stop | Done | RunEnded] = TypeAdapter(Control)


class HostLine:
    """The connections of this host's supervisor to those of other hosts.

    `others` maps a host's number to its open socket.
    """

    def __init__(self, loop: EventLoop, *, host: int = 0, others: Mapping[int, socket.socket] | None = None) -> None:
        self.host = host
        self._loop = loop
        self._sockets = dict(others or {})
        self._lines = {other: JsonLineReader() for other in self._sockets}
        self._inbox: list[tuple[int, HostAlive | RankFailed | Stop | Done | RunEnded]] = []
        now_s = time.monotonic()
        self.heard_s = dict.fromkeys(self._sockets, now_s)
        for other, connection in self._sockets.items():
            connection.settimeout(5.0)  # bounds a send to a host that reads no more
            loop.watch(connection, lambda other=other: self._read(other))  # type: ignore[misc]

    @property
    def others(self) -> tuple[int, ...]:
        """The hosts whose connection is still open."""
        return tuple(self._sockets)

    def send(self, message: HostAlive | RankFailed | Stop | Done | RunEnded, *, besides: int = -1) -> None:
        """Send `message` to all other hosts (from host 0) or to host 0 (from the others), but not to `besides`.

        A connection that fails is closed.
        """
        for other in list(self._sockets):
            if other != besides:
                try:
                    self._sockets[other].sendall(write_line(message))
                except OSError:
                    self._drop(other)

    def received(self) -> list[tuple[int, HostAlive | RankFailed | Stop | Done | RunEnded]]:
        """Return the messages received since the last call, in order, each with the host that sent it."""
        inbox, self._inbox = self._inbox, []
        return inbox

    def forgive(self, pause_s: float) -> None:
        """Do not count a pause of this supervisor of `pause_s` seconds as silence of the other hosts."""
        self.heard_s = {other: min(heard_s + pause_s, time.monotonic()) for other, heard_s in self.heard_s.items()}

    def close(self) -> None:
        """Close all connections."""
        for other in list(self._sockets):
            self._drop(other)

    def _read(self, other: int) -> None:
        try:
            data = self._sockets[other].recv(1 << 16)
            lines = self._lines[other].feed(data)
            self._inbox += [(other, read_line(line, _CONTROL)) for line in lines]
        except (OSError, WireMismatch):
            data = b""
        self.heard_s[other] = time.monotonic()
        if not data:
            self._drop(other)

    def _drop(self, other: int) -> None:
        connection = self._sockets.pop(other)
        self._loop.forget(connection)
        with contextlib.suppress(OSError):
            connection.close()
