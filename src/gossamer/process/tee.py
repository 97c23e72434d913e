"""Copy a worker's output into its log file, and to the terminal where asked."""

from __future__ import annotations

import contextlib
import os
from typing import BinaryIO

from gossamer.process.event_loop import EventLoop

_PIECE_BYTES = 65536


class Tee:
    """A copier of pipe output to a log file and to the file descriptor `onward`.

    An `onward` that cannot be written any more (a closed pager) is dropped; the log goes on. What a log cannot take (a
    full disk) is not in it, and the run goes on.
    """

    def __init__(self, loop: EventLoop, source: BinaryIO, *, log: BinaryIO, onward: int) -> None:
        self._loop, self._source, self._log = loop, source, log
        self._onward: int | None = onward
        os.set_blocking(source.fileno(), False)
        loop.watch(source, self._ready)

    def close(self) -> None:
        """Copy what is still in the pipe, then close it."""
        while not self._source.closed and self._copy():
            pass
        self._end()

    def _ready(self) -> None:
        if not self._copy():
            self._end()

    def _copy(self) -> bool:
        """Copy one piece; False when there is none (the end, or nothing left for now)."""
        try:
            data = os.read(self._source.fileno(), _PIECE_BYTES)
        except BlockingIOError:
            return False
        with contextlib.suppress(OSError):
            self._log.write(data)
            self._log.flush()
        if self._onward is not None:
            try:
                _write_all(self._onward, data)
            except OSError:
                self._onward = None
        return bool(data)

    def _end(self) -> None:
        if not self._source.closed:
            self._loop.forget(self._source)
            self._source.close()


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def last_line(log: str | os.PathLike[str], *, since_bytes: int = 0) -> str:
    """Return the last non-empty line that was written to `log` after `since_bytes`, "" when there is none.

    It reads the last 8192 bytes at most.
    """
    try:
        with open(log, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(since_bytes, file.tell() - 8192))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
