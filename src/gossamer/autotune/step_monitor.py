"""The monitor that notices when steps take something else than was forecast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TypeAlias

from gossamer.comm.channel import gathered
from gossamer.comm.comm_thread import CommThread
from gossamer.plan.exchange import StepTimes

_OFF = 0.1  # of a step: the least difference that counts, in computing or in waiting
_Difference: TypeAlias = tuple[int, int]  # of computing and of waiting: 1 longer, -1 shorter, 0 neither


@dataclass(slots=True)
class StepMonitor:
    """A monitor of what steps compute and wait, against what is expected of them.

    A difference counts when two windows running show the same.
    """

    expected: StepTimes | None = None  # None: nothing was chosen, so nothing is compared
    _steps: list[tuple[float, float]] = field(default_factory=list)  # of this window: compute_s, exposed_s
    _encoded_s: float = 0.0  # by the communication thread before this window
    _last: _Difference = (0, 0)

    def note(self, compute_s: float, exposed_s: float) -> None:
        """Take note of a step."""
        self._steps.append((compute_s, exposed_s))

    def window(self, pump: CommThread) -> tuple[StepTimes, list[float]]:
        """End this window, begin the next, and return its times, as `StepTimes.of_ranks` finds them, and what each rank
        computed in a step.

        All ranks call it.
        """
        rows = gathered(pump.channel, self._ended(pump)).tolist()
        return StepTimes.of_ranks(rows), [compute_s for compute_s, *_ in rows]

    def is_off(self, window: StepTimes) -> bool:
        """Return whether two windows running differ alike from what is expected."""
        before, self._last = self._last, self._difference(window)
        return any(self._last) and self._last == before

    def begin_anew(self, pump: CommThread, expected: StepTimes | None) -> None:
        """Expect other times from now on."""
        self._ended(pump)
        self.expected, self._last = expected, (0, 0)

    def _difference(self, window: StepTimes) -> _Difference:
        if self.expected is None:
            return 0, 0
        least = _OFF * self.expected.step_s
        pairs = (
            (window.compute_s, self.expected.compute_s),
            (window.exposed_s, self.expected.exposed_s),
        )
        computing, waiting = ((now > then) - (now < then) if abs(now - then) >= least else 0 for now, then in pairs)
        return computing, waiting

    def _ended(self, pump: CommThread) -> Sequence[float]:
        steps, self._steps = self._steps, []
        encoded_s, self._encoded_s = pump.encoded_s - self._encoded_s, pump.encoded_s
        if not steps:
            return 0.0, 0.0, 0.0
        compute_s, exposed_s = (median(one) for one in zip(*steps, strict=True))
        return compute_s, exposed_s, encoded_s / len(steps)
