"""BCRS: every rank keeps as large a fraction as its link carries in the time the slowest needs (BCRS, OPWA).

Equations (rank i of n, base fraction c0, d numbers in the gradient, V = 8 (n-1) d bytes to keep them all):
    T_i(c) = L_i + c V / B_i;   T* = max_i T_i(c0), also over the ways in, where they are known
    c_i = (T* - L_i) B_i / V;   1 where dense messages (half of V: no places) are there by T*
    c_i <- c0 + t (c_i - c0),   t <= 1 the largest with which no way in ends after T*
Symbols: L_i, B_i latency and rate of rank i's way out. All ranks get each other's messages, hence the n-1.
So all uploads that are not dense finish together, nobody sends less than with c0, and no round takes longer than then.
Paper:   Tang et al., arXiv 2408.14736 (BCRS; `gamma`, `overlap_max_senders` and `tilt` are handed to uneven_topk:
OPWA).
Good when: ways out differ and ways in are wide.   Not for: ways in as narrow as the ways out: every rank
receives all that is sent, so the slowest way in leaves no time to win (t = 0, and the reason says so). Unlike the
paper: no server; dense messages where they are as fast; the bound by the ways in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gossamer.policy import AdaptChoices, Policy
from gossamer.spec.errors import bad_input
from gossamer.spec.method_config import Written
from gossamer.spec.network import Link
from gossamer.spec.statistics import Paths, Statistics

KEPT_BYTES, DENSE_BYTES = 8, 4  # value and place; value


@dataclass(frozen=True, slots=True)
class BCRS(Policy):
    """A policy that sets every rank's top-k fraction from the bandwidth of its uplink.

    `fraction`: c0. `feedback`: the method around the exchange; "" for none. `gamma`, `overlap_max_senders` and `tilt`
    go to uneven_topk.
    """

    fraction: float = 0.01
    gamma: float = 1.0
    overlap_max_senders: int = 1
    tilt: float = 0.0
    feedback: str = "error_feedback"

    needs_paths = True

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            do = "set fraction to 0.01, for example"
            raise bad_input(wanted="0 < fraction <= 1", got=repr(self.fraction), do=do, key="fraction")
        if self.gamma != 1.0 and self.feedback:
            raise bad_input(
                wanted="gamma = 1 with error feedback",
                got=f"gamma = {self.gamma:g} and {self.feedback}",
                do='set gamma to 1, or feedback to "": error feedback would cancel what gamma adds',
                key="gamma",
            )

    def choose(self, statistics: Statistics, paths: Paths) -> AdaptChoices:
        numel = sum(statistics.numel)
        kept = fractions(self.fraction, numel, paths)
        if all(c == 1.0 for c in kept):
            return self._choices("dense", "every rank sends everything in the time the slowest needs")
        given = {"gamma": self.gamma, "overlap_max_senders": self.overlap_max_senders} if self.gamma != 1.0 else {}
        tilted = {"tilt": self.tilt} if self.tilt else {}
        said = f"fractions {min(kept):.3g} to {max(kept):.3g}, all there when {self.fraction:g} of the slowest is"
        if max(kept) <= self.fraction:
            said = f"{self.fraction:g} for all: the slowest link leaves no time for more"
        return self._choices({"uneven_topk": {"fractions": list(kept), **given, **tilted}}, said)

    def _choices(self, written: Written, reason: str) -> AdaptChoices:
        return AdaptChoices(((".*", "all", {self.feedback: written} if self.feedback else written),), reason)


def fractions(base: float, numel: int, paths: Paths) -> tuple[float, ...]:
    """Return the top-k fraction c_i of every rank."""
    whole = (len(paths.up) - 1) * numel
    if base * KEPT_BYTES >= DENSE_BYTES:
        return (1.0,) * max(1, len(paths.up))
    end = max((p.seconds(base * KEPT_BYTES * whole) for p in (*paths.up, *paths.down)), default=math.inf)
    if whole <= 0 or not math.isfinite(end):
        return (base,) * max(1, len(paths.up))
    kept = [_within(end, p, whole, base) for p in paths.up]
    return tuple(_squeezed(kept, base, [(end - p.hop_s) * p.bytes_per_s / numel for p in paths.down]))


def sent(fraction: float) -> float:
    """Return the bytes per gradient element of a message that keeps `fraction` of them."""
    return min(DENSE_BYTES, KEPT_BYTES * fraction)


def _within(end: float, link: Link, whole: int, base: float) -> float:
    room = (end - link.hop_s) * link.bytes_per_s / whole  # bytes per number of the gradient
    return 1.0 if room >= DENSE_BYTES else max(base, room / KEPT_BYTES)


def _squeezed(kept: list[float], base: float, rooms: list[float]) -> list[float]:
    """Return `kept`, moved towards `base` until what every rank receives fits its downlink (bytes per element)."""
    more = [sent(c) / KEPT_BYTES - base for c in kept]  # a dense message counts as half of the entries with places
    least = (len(kept) - 1) * base
    part = 1.0
    for room, own in zip(rooms, more, strict=False):
        arriving = sum(more) - own
        if arriving > 0:
            part = min(part, max(0.0, (room / KEPT_BYTES - least) / arriving))
    return kept if part == 1.0 else [base + part * m for m in more]
