"""A clock of a rank's own work, which stands still while the rank waits for the other ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class ComputeClock:
    """The clock of one loop. All models of the loop share it, since each of them waits in the exchanges of the others.

    `exchange="auto"` profiles a step while its gradients are exchanged, so what a step computes is known only without
    the seconds in which it waited.
    """

    _stood_s: float = 0.0  # in which it has stood still
    _depth: int = 0

    def now_s(self) -> float:
        """Return the seconds of this rank's own work so far, from any beginning. Not to be asked while it stands."""
        return time.perf_counter() - self._stood_s

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Let the clock stand still inside."""
        began_s, self._depth = time.perf_counter(), self._depth + 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:  # a wait inside another one is part of it
                self._stood_s += time.perf_counter() - began_s
