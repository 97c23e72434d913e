"""The line between the supervisors of all hosts, open as long as the run: who stands where, who failed, who stops.

Host 0 is the hub; every other host has one connection, to it. A run on one host is a hub without connections.
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
    """Where a rank stands, seen from another host."""

    rank: int
    pid: int
    step: int
    phase: str
    op: str
    sequence: int
    first_step: int
    still_s: float  # for how long it has not moved
    longest_s: float
    finished: bool
    waits: bool
    place: str


class HostAlive(Said):
    kind: Literal["alive"] = "alive"
    standings: tuple[RankPosition, ...]


class HostFailed(Said):
    kind: Literal["failed"] = "failed"
    failure: RankFailure


class Stop(Said):
    kind: Literal["stop"] = "stop"
    how: How


class Done(Said):
    """All workers of a host have ended."""

    kind: Literal["done"] = "done"
    exit_codes: tuple[int, ...]


class RunEnded(Said):
    """Host 0's last word, the same for all."""

    kind: Literal["ended"] = "ended"
    exit_code: int
    text: str


Control: TypeAlias = Annotated[HostAlive | HostFailed | Stop | Done | RunEnded, Field(discriminator="kind")]
_CONTROL: TypeAdapter[HostAlive | HostFailed | Stop | Done | RunEnded] = TypeAdapter(Control)


class HostLine:
    """This host's connections to other hosts' supervisors. `others` maps a host's number to its open socket."""

    def __init__(self, loop: EventLoop, *, host: int = 0, others: Mapping[int, socket.socket] | None = None) -> None:
        self.host = host
        self._loop = loop
        self._sockets = dict(others or {})
        self._lines = {other: JsonLineReader() for other in self._sockets}
        self._inbox: list[tuple[int, HostAlive | HostFailed | Stop | Done | RunEnded]] = []
        now_s = time.monotonic()
        self.heard_s = dict.fromkeys(self._sockets, now_s)
        for other, connection in self._sockets.items():
            connection.settimeout(5.0)  # bounds a send to a host that reads no more
            loop.watch(connection, lambda other=other: self._read(other))  # type: ignore[misc]

    @property
    def others(self) -> tuple[int, ...]:
        """Hosts whose line is still open."""
        return tuple(self._sockets)

    def send(self, message: HostAlive | HostFailed | Stop | Done | RunEnded, *, besides: int = -1) -> None:
        """To every other host (host 0) or to host 0 (the others), but not to `besides`."""
        for other in list(self._sockets):
            if other != besides:
                try:
                    self._sockets[other].sendall(write_line(message))
                except OSError:
                    self._drop(other)

    def received(self) -> list[tuple[int, HostAlive | HostFailed | Stop | Done | RunEnded]]:
        """What has come since the last call, in order, with the host it came from."""
        inbox, self._inbox = self._inbox, []
        return inbox

    def forgive(self, pause_s: float) -> None:
        """This supervisor itself was held up: that is nobody's silence."""
        self.heard_s = {other: min(heard_s + pause_s, time.monotonic()) for other, heard_s in self.heard_s.items()}

    def close(self) -> None:
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
