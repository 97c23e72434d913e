"""A clock for the quorum of rounds which runs only while a rank is held up: no busy machine makes another one late."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch.distributed as dist

from gossamer.sync import _quorum

_HELD, _FREED = "held up", "freed"


class HeldUpClock:
    """The seconds in which a rank was held up, as every rank sees them by keys of `signals`."""

    def __init__(self, signals: dist.Store) -> None:
        self.signals, self._lock = signals, threading.Lock()
        self._runs, self._last_s, self._elapsed_s = False, 0.0, 0.0

    def monotonic(self) -> float:
        with self._lock:
            now_s = time.monotonic()
            self._elapsed_s += now_s - self._last_s if self._runs else 0.0
            self._last_s, self._runs = now_s, self.signals.check([_HELD]) and not self.signals.check([_FREED])
            return self._elapsed_s

    @contextmanager
    def held_up(self) -> Iterator[None]:
        """Let the clock run, on all ranks, while this one waits for what it is held up by."""
        self.signals.set(_HELD, "")
        yield
        self.signals.set(_FREED, "")

    @contextmanager
    def in_force(self) -> Iterator[None]:
        with patch.object(_quorum, "time", self):
            yield
