"""Progress of what is done before a run's first step, in lines of the run's display."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from gossamer.spec.records import Event
from gossamer.view.display import Display


@dataclass(slots=True, kw_only=True, eq=False)
class ToldProgress:
    """Says what is done when it begins, and how far it is every few seconds; a call is one report of progress.

    `whose`: begins every line; `clock`: seconds.
    """

    display: Display
    whose: str
    every_s: float = 5.0
    clock: Callable[[], float] = time.monotonic
    _what: str = ""
    _told_s: float = 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        """Take in that `done` of `total` are done of `what`; total 0: it has no parts."""
        now = self.clock()
        if what == self._what and now - self._told_s < self.every_s:
            return
        self._what, self._told_s = what, now
        self.display.show(Event(level="info", message=f"{self.whose}: {what}{f', {done} of {total}' if total else ''}"))
