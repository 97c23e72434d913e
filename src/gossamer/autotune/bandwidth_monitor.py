"""The monitor that notices when the bandwidth of messages has drifted."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from gossamer.comm.channel import gathered
from gossamer.comm.comm_thread import CommThread
from gossamer.spec.network import Link

_WATCH_STEPS = 20  # interval of bandwidth checks
_STEADY_WINDOWS = 4  # running, after which a longer interval is halved again
_LEAST_STEPS = 10  # of a window that others are compared with: a run may begin shortly before an interval ends
_DRIFT = 2.0  # factor of change that triggers a new choice
_LEAST_SHARE = 0.05  # of the time that waits for messages: where it is less, the waiting is noise
_STEADY = 0.05  # fraction by which windows of the same steps differ in time
_BYTES = 1 << 20  # of the message by which two measurements of links are compared
_SHORT_S = 0.02  # of that message: 400 Mbit/s


@dataclass(frozen=True, slots=True)
class BandwidthWindow:
    """The messages of some steps: bytes sent, seconds of waiting for messages in flight.

    `step_s`: seconds of a step, the median, so that evaluations and checkpoints between steps do not count.
    """

    sent_bytes: float
    waited_s: float
    step_s: float
    steps: float

    @property
    def bytes_per_s(self) -> float:
        return self.sent_bytes / max(self.waited_s, 1e-6)

    @property
    def share(self) -> float:
        """The fraction of the steps' time in which messages were waited for."""
        return self.waited_s / max(self.step_s * self.steps, 1e-6)

    def drift_from(self, first: BandwidthWindow) -> int:
        """Return 1 if the links are faster than in the window `first`, -1 if slower, 0 if neither can be said.

        They are by a factor of 2, where messages were waited for in at least 5% of either window. Faster links make no
        step longer, and slower ones no step shorter: if they do, the computation has changed and not the links.
        """
        if max(self.share, first.share) < _LEAST_SHARE:
            return 0
        ratio, longer = self.bytes_per_s / max(first.bytes_per_s, 1e-6), self.step_s / max(first.step_s, 1e-6)
        if ratio >= _DRIFT and longer <= 1 + _STEADY:
            return 1
        return -1 if ratio <= 1 / _DRIFT and longer >= 1 - _STEADY else 0


def differ(before: Mapping[str, Link], now: Mapping[str, Link]) -> bool:
    """Return whether a message of 1 MiB takes twice or half as long on some level, or other levels were found.

    Messages that take a few milliseconds both times do not count: a busy machine explains them.
    """
    if before.keys() != now.keys():
        return True
    pairs = [(before[name].seconds(_BYTES), link.seconds(_BYTES)) for name, link in now.items()]
    return any(max(pair) >= max(_DRIFT * min(pair), _SHORT_S) for pair in pairs)


@dataclass(slots=True)
class BandwidthMonitor:
    """A monitor of the bandwidth of messages, against the first window of steps after the choice.

    A change counts when two windows running show it.
    """

    active: bool = False
    every: int = _WATCH_STEPS
    first: BandwidthWindow | None = None
    sent_bytes: int = 0
    busy_s: float = 0.0
    steps_s: list[float] = field(default_factory=list)  # of the window's steps
    _ended_s: float = 0.0  # when the last step ended; 0: before the first one
    _last: int = 0  # the change that the window before has shown
    _steady: int = 0  # windows running that showed none

    def due(self, step: int) -> bool:
        """Return whether the bandwidth is to be checked after `step`. Call it after every step: it times them.

        A first window grows until it has enough steps.
        """
        if not self.active:
            return False
        now, before = time.perf_counter(), self._ended_s
        self._ended_s = now
        if before:
            self.steps_s.append(now - before)
        return step % self.every == 0 and (self.first is not None or len(self.steps_s) >= _LEAST_STEPS)

    def window(self, pump: CommThread) -> BandwidthWindow:
        """End this window, begin the next, and return that of the rank that waits least. All ranks call it.

        The others wait for that rank too, and not for their links alone: a message ends once the last one sent its own.
        """
        mine = self._ended(pump)
        rows = gathered(pump.channel, [mine.sent_bytes, mine.waited_s, mine.step_s, mine.steps]).tolist()
        return min((BandwidthWindow(*row) for row in rows), key=lambda window: window.waited_s)

    def drifted(self, window: BandwidthWindow) -> bool:
        """Return whether two windows running differ alike from the first one, which this call sets if there is none."""
        if self.first is None:
            self.first = window
            return False
        before, self._last = self._last, window.drift_from(self.first)
        self._steady = 0 if self._last else self._steady + 1
        if self._steady == _STEADY_WINDOWS and self.every > _WATCH_STEPS:
            self.every, self._steady = self.every // 2, 0
        return self._last != 0 and self._last == before

    def skip(self, pump: CommThread) -> None:
        """Leave out what was sent until now, such as the messages of a link probe."""
        self._ended(pump)

    def forget(self) -> None:
        """Make the next window the measure: other messages pass at another rate."""
        self.first, self._last, self._steady = None, 0, 0

    def begin_anew(self, pump: CommThread) -> None:
        """Restart after a link probe. The interval doubles, as each probe takes seconds; steady windows halve it."""
        self.forget()
        self.every *= 2
        self.skip(pump)

    def _ended(self, pump: CommThread) -> BandwidthWindow:
        sent, busy = pump.channel.meter.total_bytes, pump.busy_s
        step_s = median(self.steps_s) if self.steps_s else 0.0
        window = BandwidthWindow(sent - self.sent_bytes, busy - self.busy_s, step_s, len(self.steps_s))
        self.sent_bytes, self.busy_s, self.steps_s = sent, busy, []
        return window
