"""The time that a rank waits for messages."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class Timing:
    """The communication time of a step: `exposed_s`, seconds this rank waited for messages.

    `agreed_s`: of these, the seconds in which the ranks agreed on the step, after all exchanges.
    """

    exposed_s: float = 0.0
    agreed_s: float = 0.0

    @property
    def exchanged_s(self) -> float:
        """Return the seconds this rank waited for anything but the agreement."""
        return self.exposed_s - self.agreed_s

    def begin(self) -> None:
        """Begin a step: nothing has been waited for."""
        self.exposed_s = self.agreed_s = 0.0

    def timed_wait(self, what: Callable[[], T]) -> T:
        """Call `what`, add the seconds it takes to `exposed_s`, and return its result."""
        began = time.perf_counter()
        found = what()
        self.exposed_s += time.perf_counter() - began
        return found
