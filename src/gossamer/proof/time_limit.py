"""The time limit of a proof's single-process run, which keeps the proof cheap beside the training run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from gossamer.spec.units import show_seconds

_SHARE = 4  # a proof may take 1/4 of the run's time
_SLOWER = 20  # times the first micro-batch: the machine is swapping
_ALWAYS_S = 30.0  # allowed for any micro-batch


class NotProved(Exception):
    """The error of a parity proof that is not possible: the unsharded model lacks memory, is too slow, or fails."""


@dataclass(slots=True, kw_only=True)
class ProofTimeLimit:
    """The time limit of one process, checked after the model was built and after every micro-batch.

    `run_s`: seconds that the whole run may take, 0 for no limit; `pieces`: micro-batches of the proof in all.
    """

    run_s: float
    pieces: int
    clock: Callable[[], float] = time.perf_counter
    _done: int = 0
    _first_s: float = 0.0
    _last: float = field(default=0.0)

    def pulse(self) -> None:
        """Record the end of one unit of work and check the limit.

        Raises NotProved if the proof would take more than a quarter of `run_s`. Also raises it if a micro-batch takes
        longer than both 30 s and 20 times the first one.
        """
        now = self.clock()
        took, self._last = now - self._last, now
        self._done += 1
        if self._done == 2:
            self._first_s = took
            if self.run_s and took * self.pieces > self.run_s / _SHARE:
                raise NotProved(
                    f"the proof would take about {show_seconds(took * self.pieces)} of the {show_seconds(self.run_s)} "
                    f"that train.seconds gives the run, more than 1/{_SHARE} of it"
                )
        if self._done > 2 and took > max(_ALWAYS_S, _SLOWER * self._first_s):
            raise NotProved(
                f"a micro-batch of the whole model took {show_seconds(took)}, and the first one "
                f"{show_seconds(self._first_s)}: the machine is short of memory, or busy"
            )
