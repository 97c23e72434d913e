"""The three limits of a run whose states lie in tiers: each allocation is counted and checked."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class TierAccount:
    """The bytes of one tier that are in use, at most `limit`. Any thread may take and give."""

    tier: str
    limit: int
    used: int = 0
    peak: int = 0
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def take(self, count: int) -> None:
        """Count bytes that are about to be allocated; more than the limit is an error of the program."""
        with self._changed:
            assert self.used + count <= self.limit, f"{self.tier}: {self.used} + {count} bytes exceed {self.limit}"
            self.used += count
            self.peak = max(self.peak, self.used)

    def try_take(self, count: int) -> bool:
        """Count bytes if there is room for them; return whether there was."""
        with self._changed:
            if self.used + count > self.limit:
                return False
            self.used += count
            self.peak = max(self.peak, self.used)
            return True

    def take_in_turn(self, count: int, failed: Callable[[], None]) -> None:
        """Wait until others have given enough back, and count the bytes. `failed` raises if nobody will."""
        while not self.try_take(count):
            failed()
            with self._changed:
                if self.used + count > self.limit:
                    self._changed.wait(0.05)

    def give(self, count: int) -> None:
        """Count bytes that have been freed."""
        with self._changed:
            self.used -= count
            assert self.used >= 0, f"{self.tier}: more bytes given back than taken"
            self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class TierLimits:
    """The limits of a rank: weights for compute, buffers beside them, and the file."""

    device: TierAccount
    host: TierAccount
    file: TierAccount

    @staticmethod
    def of(*, device: int, host: int, file: int) -> TierLimits:
        return TierLimits(TierAccount("device", device), TierAccount("host", host), TierAccount("file", file))
