"""The monitor that notices when the bandwidth of messages has drifted."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.comm.comm_thread import CommThread

_WATCH_STEPS = 20  # interval of bandwidth checks
_DRIFT = 2.0  # factor of change that triggers a new choice


@dataclass(slots=True)
class BandwidthMonitor:
    """A monitor of the bandwidth of messages, against the bandwidth right after the choice."""

    active: bool = False
    every: int = _WATCH_STEPS
    first: float = 0.0
    sent_bytes: int = 0
    busy_s: float = 0.0

    def due(self, step: int) -> bool:
        """Return whether the bandwidth is to be checked after `step`."""
        return self.active and step % self.every == 0

    def rate(self, pump: CommThread) -> float:
        """Return bytes per second of waiting for messages in flight, since the last call."""
        sent, busy = pump.channel.meter.total_bytes - self.sent_bytes, pump.busy_s - self.busy_s
        self.sent_bytes, self.busy_s = pump.channel.meter.total_bytes, pump.busy_s
        return sent / max(busy, 1e-6)

    def drifted(self, rate: float) -> bool:
        """Return whether `rate` differs much from the first one, which this call sets if there is none."""
        if not self.first:
            self.first = rate
            return False
        return not 1 / _DRIFT < rate / self.first < _DRIFT

    def begin_anew(self, pump: CommThread) -> None:
        """Restart after a link probe. The interval doubles, because each probe takes seconds."""
        self.first, self.every = 0.0, 2 * self.every
        self.rate(pump)
