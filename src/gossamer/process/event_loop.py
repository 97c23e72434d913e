"""One event loop for every socket and pipe of a supervisor, so that it needs no thread."""

from __future__ import annotations

import contextlib
import selectors
from collections.abc import Callable
from typing import Protocol


class HasFileno(Protocol):
    """An object with a file descriptor: a socket or a pipe."""

    def fileno(self) -> int:
        """Return the file descriptor."""


class EventLoop:
    """An event loop that calls back when a socket or pipe is readable."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def watch(self, source: HasFileno, ready: Callable[[], None]) -> None:
        """Call `ready` in every turn in which `source` is readable (it has data, or its other end closed it)."""
        self._selector.register(source, selectors.EVENT_READ, ready)

    def forget(self, source: HasFileno) -> None:
        """Stop watching `source`; call it before closing. Unknown sources are no error."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(source)

    def turn(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` seconds for a readable source, then call back for every readable source."""
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj in (self._selector.get_map() or {}):  # an earlier callback may have dropped it
                key.data()

    def close(self) -> None:
        """Close the loop; its sources stay open."""
        self._selector.close()
