"""Changes of links while a command runs: a list of events, each with its time."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gossamer.netlab.traffic_shaping import LinkRates
from gossamer.spec.errors import bad_input
from gossamer.spec.units import read_rate

_WRITTEN = re.compile(r"([0-9.]+)s\s+(slow|cut|heal)\s+h(\d+)(?:-h(\d+))?(?:\s+(\S+))?")


@dataclass(frozen=True, slots=True)
class LinkEvent:
    """A timed change of an emulated link: after `after_s` seconds the link of `host`, or only its traffic with `to`.

    verb: slow (to `rate_bytes_per_s`), cut or heal.
    """

    after_s: float
    verb: str
    host: int
    to: int | None = None
    rate_bytes_per_s: float = 0.0

    @staticmethod
    def parse(written: str) -> LinkEvent:
        """Parse "10s slow h1 5mbit", "20s cut h1-h2" or "30s heal h1"; raises BadInput."""
        match = _WRITTEN.fullmatch(written.strip())
        if match is None or (match.group(2) == "slow") != (match.group(5) is not None):
            raise bad_input(
                wanted='a change such as "10s slow h1 5mbit", "20s cut h1-h2" or "30s heal h1"',
                got=repr(written),
                do="write time, what happens, to which link, and for slow the new rate",
                key="event",
            )
        after, verb, host, to, rate = match.groups()
        return LinkEvent(
            float(after), verb, int(host), int(to) if to else None, read_rate(rate, key="event") if rate else 0.0
        )

    def applied(self, shape: LinkRates) -> LinkRates:
        """Return the link rates after this change; raises BadInput for an unknown host or an impossible rate."""
        if self.verb == "slow":
            return shape.slowed(self.host, self.rate_bytes_per_s, self.to)
        return shape.severed(self.host, self.to) if self.verb == "cut" else shape.healed(self.host, self.to)


class EventSchedule:
    """A schedule of link events, whose times count from its construction."""

    def __init__(self, changes: Sequence[LinkEvent], apply: Callable[[LinkEvent], None]) -> None:
        self._coming = sorted(changes, key=lambda change: change.after_s)
        self._apply = apply
        self._start = time.monotonic()

    def keep(self) -> None:
        """Apply the events that are due."""
        while self._coming and self._coming[0].after_s <= time.monotonic() - self._start:
            self._apply(self._coming.pop(0))
