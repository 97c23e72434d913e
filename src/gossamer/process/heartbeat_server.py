"""The supervisor's side of the heartbeat: when each rank was last heard, and when it last made progress."""

from __future__ import annotations

import hmac
import secrets
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Annotated, TypeAlias

from pydantic import Field, TypeAdapter

from gossamer.process.event_loop import EventLoop
from gossamer.process.heartbeat import Beat, Goodbye, HeartbeatHello
from gossamer.process.json_lines import JsonLineReader, read_line
from gossamer.process.liveness import Liveness
from gossamer.spec.errors import WireMismatch

HeartbeatMessage: TypeAlias = Annotated[HeartbeatHello | Beat | Goodbye, Field(discriminator="kind")]
_HEARD: TypeAdapter[HeartbeatHello | Beat | Goodbye] = TypeAdapter(HeartbeatMessage)
_LINE_BYTES = 4096


class HeartbeatServer:
    """A server for the heartbeats of `ranks`, on `address` alone.

    It drops connections that do not know the token or send invalid messages.
    """

    def __init__(
        self,
        loop: EventLoop,
        ranks: Iterable[int],
        *,
        address: str = "127.0.0.1",
        generation: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.token = secrets.token_hex(16)
        self._loop, self._generation, self._clock = loop, generation, clock
        started_s = clock()
        self.pulses = {rank: Liveness(rank=rank, heard_s=started_s, progress_s=started_s) for rank in ranks}
        self._connections: dict[socket.socket, _Connection] = {}
        self._listener = socket.create_server((address, 0), backlog=len(self.pulses) + 8)
        self._listener.setblocking(False)
        self.address = "{}:{}".format(*self._listener.getsockname()[:2])
        loop.watch(self._listener, self._accept)

    def forgive(self, pause_s: float) -> None:
        """Do not count a pause of this supervisor of `pause_s` seconds as silence of its ranks."""
        now_s = self._clock()
        self.pulses = {rank: pulse.later(pause_s, now_s) for rank, pulse in self.pulses.items()}

    def finish(self, rank: int) -> None:
        """Mark `rank` as ended: its silence is no failure."""
        self.pulses[rank] = replace(self.pulses[rank], finished=True)

    def close(self) -> None:
        """Close all connections and the listening socket."""
        for connection in list(self._connections):
            self._drop(connection)
        self._loop.forget(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        connection.setblocking(False)
        self._connections[connection] = _Connection()
        self._loop.watch(connection, lambda: self._read(connection))

    def _read(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        try:
            for line in self._connections[connection].lines.feed(data):
                self._hear(self._connections[connection], read_line(line, _HEARD))
        except WireMismatch:
            data = b""
        if not data:
            self._drop(connection)

    def _hear(self, connection: _Connection, said: HeartbeatHello | Beat | Goodbye) -> None:
        now_s = self._clock()
        if isinstance(said, HeartbeatHello):
            known = said.rank in self.pulses and said.generation == self._generation
            if not known or not hmac.compare_digest(said.token.encode(), self.token.encode()):
                raise WireMismatch(
                    f"refused a heartbeat connection: wanted a rank of generation {self._generation} with the token of "
                    f"this run, got rank {said.rank} of generation {said.generation}"
                )
            connection.rank = said.rank
            self.pulses[said.rank] = replace(self.pulses[said.rank], pid=said.pid, heard_s=now_s)
        elif said.rank != connection.rank:
            raise WireMismatch(
                f"wanted a heartbeat of rank {connection.rank} on its connection, got a heartbeat of rank {said.rank}"
            )
        elif isinstance(said, Goodbye):
            self.pulses[said.rank] = replace(self.pulses[said.rank], finished=True, heard_s=now_s)
        else:
            self.pulses[said.rank] = self.pulses[said.rank].beaten(said.model_dump(), now_s)

    def _drop(self, connection: socket.socket) -> None:
        self._loop.forget(connection)
        self._connections.pop(connection, None)
        connection.close()


class _Connection:
    """What came on one socket; `rank` is known once it has greeted."""

    def __init__(self) -> None:
        self.lines = JsonLineReader(_LINE_BYTES)
        self.rank = -1
