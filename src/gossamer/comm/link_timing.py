"""Time messages between ranks, over the channel that the run itself uses: round trips, pairs, and all ranks at once.

All ranks call every function together, while no step is in flight. Every rank gets the times of all, so all ranks take
the same decisions. What a rank sends for one measurement and what it receives are at most 16 MiB each, whatever the
number of ranks. Ranks are numbered by their place among all ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from gossamer.comm.channel import Channel, gathered
from gossamer.comm.message import Collective, Message
from gossamer.spec.errors import bad_input
from gossamer.spec.network import NOISY_SPREAD

Pair: TypeAlias = tuple[int, int]  # two ranks; of a transfer, the sender and the receiver

LARGEST_BYTES = 1 << 24  # that a rank sends at once: beyond, a link is fast enough not to matter
PEERS = 16  # to which a rank sends at once
_FIRST_BYTES = 1 << 14
_LONG_ENOUGH_S = 0.25  # a message of all ranks that takes so long has outlived the bursts that shapers let through
_PAIR_LONG_ENOUGH_S = _LONG_ENOUGH_S / 3
_LATENCIES = 10  # that a transfer must outlast: else its latency, or the slow start of TCP, is timed
_SHARING = 1 / 4  # of the time to take: of a pair that may share its link with one that ends
_MARGIN = 1.25  # of the time to take: of a first message whose rate is expected, as that may be a little more
_BURST = 1 / 8  # of the time to take: a repeated transfer that takes less has passed a rested shaper at once
_HOPS = 3  # of which the fastest counts
_LEAST_S = 1e-6  # what clocks can tell apart


@dataclass(frozen=True, slots=True)
class Reading:
    """The bandwidth that some readings found: the fastest, since other work can only slow a transfer down.

    `spread`: by what fraction the slowest reading took longer than the fastest. `hop_s`: of small messages that
    all ranks send at the same time; 0: not measured.
    """

    bytes_per_s: float
    spread: float = 0.0
    hop_s: float = 0.0

    @staticmethod
    def of(nbytes: int, seconds: Sequence[float], latency_s: float) -> Reading:
        """Return the bandwidth of transfers of `nbytes` that took `seconds` each, `latency_s` of them on the way."""
        own = [_without(latency_s, taken) for taken in seconds]
        return Reading(nbytes / min(own), max(own) / min(own) - 1)


@dataclass(frozen=True, slots=True)
class Pattern:
    """The transfers of one rank in a measurement of all ranks: it sends the same number of bytes to every rank of `to`,
    and receives as many from every rank of `source`. `shares`: the most ranks that any rank sends to.
    """

    to: tuple[int, ...]
    source: tuple[int, ...]
    shares: int = 1


def latencies(channel: Channel, pairs: Sequence[Pair], *, repeats: int, level: str) -> dict[Pair, float]:
    """Return the one-way seconds of a small message of every pair: half of its fastest round trip of `repeats`.

    No rank is in two pairs; all pairs measure at once.
    """
    me, best = place_of(channel), 0.0
    mine = next((pair for pair in pairs if me in pair), None)
    if mine is not None:
        best = min(_round_trip_s(channel, mine) for _ in range(repeats)) / 2
    times = _agreed(channel, best, level)
    return {pair: times[pair[0]] for pair in pairs}


def pair_readings(
    channel: Channel, pairs: Sequence[Pair], latency_s: Mapping[Pair, float], *, level: str, bytes_per_s: float = 0.0
) -> dict[Pair, Reading]:
    """Return the bandwidth from the first to the second rank of every pair, all pairs at once.

    No rank is in two pairs. A pair whose message took long enough stops, with those that took a quarter of that, which
    may share its link; the others send more. Readings of a pair that differ by more than `NOISY_SPREAD` are repeated
    once, while the others send again. `bytes_per_s`: at which the slowest pair is expected to send, alike on all ranks:
    its first message takes long enough then, where small ones would be many round trips of far ranks.
    """
    least_s = max(_PAIR_LONG_ENOUGH_S, _LATENCIES * max((latency_s[pair] for pair in pairs), default=0.0))
    found, nbytes = dict[Pair, Reading](), _first_bytes(bytes_per_s, least_s, LARGEST_BYTES)
    while left := [pair for pair in pairs if pair not in found]:
        taken = _twice(channel, left, nbytes, level)
        done = {p: _done(_PAIR_LONG_ENOUGH_S, latency_s[p], min(taken[p]) - 2 * latency_s[p]) for p in left}
        enough = _SHARING if max(done.values()) >= 1 else 1.0
        ended = [pair for pair in left if done[pair] >= enough or nbytes >= LARGEST_BYTES]
        far = [p for p in ended if Reading.of(nbytes, taken[p], 2 * latency_s[p]).spread > NOISY_SPREAD]
        if far:
            again = _twice(channel, left, nbytes, level)
            for p in far:
                passed = [
                    s for s in again[p] if _done(_PAIR_LONG_ENOUGH_S, latency_s[p], s - 2 * latency_s[p]) >= _BURST
                ]
                taken[p] = taken[p] + (again[p] if nbytes >= LARGEST_BYTES else passed)
        found |= {p: Reading.of(nbytes, taken[p], 2 * latency_s[p]) for p in ended}
        nbytes = _grown(nbytes, max((done[p] for p in left if p not in found), default=1.0), LARGEST_BYTES)
    return found


def pattern_reading(channel: Channel, pattern: Pattern, *, level: str, bytes_per_s: float = 0.0) -> Reading:
    """Return the bandwidth and the hop that every rank has while all send in this pattern: those of the slowest rank.

    A rank is done when all is sent and all has arrived, so the slower direction of its link counts. A hop is the
    fastest of a few. Readings that differ by more than `NOISY_SPREAD` are repeated once. `bytes_per_s`: that is
    expected of a rank, alike on all ranks: the first messages are as long as that needs.
    """
    most = LARGEST_BYTES // pattern.shares
    gathered(channel, [0.0])  # nobody starts before all are here; later readings start when the last times are known
    hop_s = min(slowest(channel, pattern, 1, level) for _ in range(_HOPS))
    nbytes = _first_bytes(bytes_per_s / pattern.shares, max(_LONG_ENOUGH_S, _LATENCIES * hop_s), most)
    while True:
        taken = [slowest(channel, pattern, nbytes, level)]
        done = _done(_LONG_ENOUGH_S, hop_s, taken[0] - hop_s)
        if done >= 1 or nbytes >= most:
            taken.append(slowest(channel, pattern, nbytes, level))
            done = _done(_LONG_ENOUGH_S, hop_s, min(taken) - hop_s)  # one long time may be a late start
            if done >= 1 / 2 or nbytes >= most:
                break
        nbytes = _grown(nbytes, done, most)
    if Reading.of(nbytes, taken, hop_s).spread > NOISY_SPREAD:
        again = [slowest(channel, pattern, nbytes, level) for _ in range(2)]
        passed = [s for s in again if _done(_LONG_ENOUGH_S, hop_s, s - hop_s) >= _BURST]
        taken += again if nbytes >= most else passed
    return replace(Reading.of(nbytes * pattern.shares, taken, hop_s), hop_s=hop_s)


def slowest(channel: Channel, pattern: Pattern, nbytes: int, level: str) -> float:
    """Return the seconds of the rank that needs longest for `nbytes` to and from every rank of its pattern."""
    return max(_agreed(channel, _together_s(channel, pattern, nbytes), level))


def place_of(channel: Channel) -> int:
    """Return the place of this rank among all ranks."""
    return channel.levels.everyone.index(channel.rank)


def _without(latency_s: float, seconds: float) -> float:
    """Return the seconds of a transfer's bytes alone; at least a quarter, where latency is most of it."""
    return max(seconds - latency_s, seconds / 4, _LEAST_S)


def _done(least_s: float, latency_s: float, seconds: float) -> float:
    """Return what fraction of the time that a transfer must take to be measured it has taken."""
    return seconds / max(least_s, _LATENCIES * latency_s)


def _first_bytes(bytes_per_s: float, least_s: float, most: int) -> int:
    """Return the bytes of a first message, which at its expected rate takes `least_s` and a margin. Rate 0: unknown."""
    return min(max(_FIRST_BYTES, int(_MARGIN * bytes_per_s * least_s)), most)


def _grown(nbytes: int, done: float, most: int) -> int:
    return min(most, nbytes * (8 if done < 1 / 8 else 4 if done < 1 / 4 else 2))


def _agreed(channel: Channel, seconds: float, level: str) -> list[float]:
    """Return the seconds of all ranks. Raises BadInput, on all ranks, for a time that is none."""
    times: list[float] = gathered(channel, [seconds])[:, 0].tolist()
    for rank, taken in zip(channel.levels.everyone, times, strict=True):
        if not (math.isfinite(taken) and taken >= 0):
            raise bad_input(
                wanted=f"a finite time of 0 s or more for a message of the link probe (process group {level!r})",
                got=f"{taken:g} s on rank {rank}",
                do="check the clock of that rank's host, or name methods of exchange and sync instead of auto",
                key="plan.exchange",
            )
    return times


def _twice(channel: Channel, pairs: Sequence[Pair], nbytes: int, level: str) -> dict[Pair, list[float]]:
    """Return two readings of every pair."""
    times = [_agreed(channel, _pulled_s(channel, pairs, nbytes), level) for _ in range(2)]  # each begins together
    return {pair: [reading[pair[1]] for reading in times] for pair in pairs}


def _pulled_s(channel: Channel, pairs: Sequence[Pair], nbytes: int) -> float:
    """Return the seconds from the receiver's request to the last byte at the receiver; 0 on other ranks.

    The sender has said before that it is there: no other wait of it is timed.
    """
    me, byte = place_of(channel), torch.zeros(1, dtype=torch.uint8)
    for sender, receiver in pairs:
        if me == sender:
            _moved(channel, byte, {receiver: 1}, {receiver: 1})
            _moved(channel, torch.zeros(nbytes, dtype=torch.uint8), {receiver: nbytes}, {})
        elif me == receiver:
            _moved(channel, byte[:0], {}, {sender: 1})
            began = time.perf_counter()
            _moved(channel, byte, {sender: 1}, {sender: nbytes})
            return max(time.perf_counter() - began, _LEAST_S)
    return 0.0


def _round_trip_s(channel: Channel, pair: Pair) -> float:
    """Return the seconds until the reply to one byte, on the first rank of the pair; 0 on the second."""
    byte, (first, second) = torch.zeros(1, dtype=torch.uint8), pair
    if place_of(channel) == second:
        _moved(channel, byte[:0], {}, {first: 1})
        _moved(channel, byte, {first: 1}, {})
        return 0.0
    began = time.perf_counter()
    _moved(channel, byte, {second: 1}, {second: 1})
    return max(time.perf_counter() - began, _LEAST_S)


def _together_s(channel: Channel, pattern: Pattern, nbytes: int) -> float:
    """Return the seconds until this rank has sent and received its part of the pattern."""
    part = torch.zeros(nbytes * len(pattern.to), dtype=torch.uint8)
    began = time.perf_counter()
    _moved(channel, part, dict.fromkeys(pattern.to, nbytes), dict.fromkeys(pattern.source, nbytes))
    return max(time.perf_counter() - began, _LEAST_S)


def _moved(channel: Channel, part: Tensor, to: Mapping[int, int], source: Mapping[int, int]) -> Tensor:
    """Send rows of `part` to other ranks, and return those that arrive; both by rank, in rows."""
    ranks = range(len(channel.levels.everyone))
    splits, arriving = (tuple(way.get(r, 0) for r in ranks) for way in (to, source))
    (got,) = channel.start(Message((part,), Collective.SHUFFLE, channel.levels.whole, splits, arriving)).wait()
    return got
