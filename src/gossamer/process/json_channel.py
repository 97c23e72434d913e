"""One end of a connection between two of our own processes: JSON lines, validated by a schema."""

from __future__ import annotations

import socket
from typing import Generic, TypeVar

from pydantic import TypeAdapter

from gossamer.process.json_lines import JsonLineReader, Said, read_line, write_line

LIMIT_BYTES = 1 << 28  # of a greeting, which has the names of all parameters
T = TypeVar("T")


class JsonChannel(Generic[T]):
    """A connected socket that sends any message and receives those of `kind`."""

    def __init__(self, connection: socket.socket, kind: TypeAdapter[T]) -> None:
        self.connection, self._kind = connection, kind
        self._reader, self._lines = JsonLineReader(LIMIT_BYTES), list[bytes]()

    def send(self, message: Said) -> None:
        """Send a message. Raises OSError where the other process is gone."""
        self.connection.sendall(write_line(message))

    def receive(self) -> T | None:
        """Return the next message, once it is there; None where the other process is gone. Raises WireMismatch."""
        while not self._lines:
            try:
                data = self.connection.recv(1 << 16)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._lines += self._reader.feed(data)
        return read_line(self._lines.pop(0), self._kind)

    @property
    def has_line(self) -> bool:
        """Return whether a whole line is there already."""
        return bool(self._lines)
