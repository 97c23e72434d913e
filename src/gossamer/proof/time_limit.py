"""How long one process may take: a proof is to cost little beside the run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from gossamer.spec.units import show_seconds

_SHARE = 4  # of the time that a run was given, at most one part in so many
_SLOWER = 20  # times the first micro-batch, and another has found the machine swapping
_ALWAYS_S = 30.0  # that a micro-batch may take


class NotProved(Exception):
    """One process could not be had, or fails by itself. Says why."""


@dataclass(slots=True, kw_only=True)
class TimeLimit:
    """`pulse` is called when the model was built and after every micro-batch. `run_s`: what the run was given, 0: any
    time; `pieces`: of work, in all.
    """

    run_s: float
    pieces: int
    clock: Callable[[], float] = time.perf_counter
    _done: int = 0
    _first_s: float = 0.0
    _last: float = field(default=0.0)

    def pulse(self) -> None:
        """Raises NotProved."""
        now = self.clock()
        took, self._last = now - self._last, now
        self._done += 1
        if self._done == 2:
            self._first_s = took
            if self.run_s and took * self.pieces > self.run_s / _SHARE:
                raise NotProved(
                    f"it would take about {show_seconds(took * self.pieces)} of the {show_seconds(self.run_s)} that "
                    "train.seconds gives the run"
                )
        if self._done > 2 and took > max(_ALWAYS_S, _SLOWER * self._first_s):
            raise NotProved(
                f"a micro-batch of the whole model took {show_seconds(took)}, and the first one "
                f"{show_seconds(self._first_s)}: the machine is short of memory, or busy"
            )
