"""Measure the bandwidth and latency of the links between ranks, over the channel that the run itself uses.

All ranks call it together, before the first step. The bandwidth of all ranks together is measured while all of them
send, because a step uses the links like that. Pairs are measured while as many ranks send as have nothing to receive.
Sizes grow until a message takes long enough to average out traffic shaping and start-up. Every decision is taken from
times that all ranks have exchanged, so that all of them measure the same things.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import torch

from gossamer.comm.channel import Channel, gathered
from gossamer.comm.message import Collective, Message
from gossamer.spec.network import Link, Network

_LONG_ENOUGH_S = 0.25  # a message that takes so long has outlived the bursts that shapers let through
_FIRST_BYTES = 1 << 14
_LARGEST_BYTES = 1 << 24  # to every peer: beyond, a link is fast enough not to matter
_SMALL_REPEATS = 9
_PAIR_REPEATS = 2
PAIRS_RANKS = 16  # beyond, pairs are not measured one by one
_GAP = 2.5  # links that differ by less are one kind of link
_WIDE = 1.5  # factor by which a rank's uplink or downlink must be faster to be listed


@dataclass(frozen=True, slots=True)
class _Pattern:
    """The senders and receivers of one measurement: this rank sends `splits[i]` shares to rank i."""

    splits: tuple[int, ...]
    arriving: tuple[int, ...]


def probe(channel: Channel, *, ways: bool = False) -> Network:
    """Measure the links and return the network, the same on every rank. Raises PeerLost.

    It takes a few seconds on slow links, less on fast ones. `ways`: measure pairs also between two ranks, which are
    never islands, to find unequal uplinks.
    """
    everyone = channel.levels.everyone
    if len(everyone) == 1:
        return Network(islands=(everyone,), levels={"all": Link(latency_s=0.0, bytes_per_s=1e12)})
    latency = _latency(channel)
    overall = _rate(channel, _to_all(channel))
    levels = {"all": Link(latency_s=latency, bytes_per_s=overall)}
    if not (2 if ways else 3) <= len(everyone) <= PAIRS_RANKS:
        return Network(islands=(everyone,), levels=levels)
    rates = _pair_rates(channel)
    islands = islands_of(rates)
    if not 1 < len(islands) < len(everyone):  # each rank by itself shares a faster link with none
        islands = (everyone,)
    else:
        slow, fast = _sides(rates, islands)
        levels["island"] = Link(latency_s=latency, bytes_per_s=fast)
        levels["between"] = Link(latency_s=latency, bytes_per_s=slow)
    out, into = ways_of(rates, islands, slowest=overall)
    uplinks, downlinks = (
        {rank: Link(latency_s=latency, bytes_per_s=rate) for rank, rate in ways.items()} for ways in (out, into)
    )
    return Network(islands=islands, levels=levels, uplinks=uplinks, downlinks=downlinks)


def neighbors(channel: Channel, shifts: Sequence[int] = (1,)) -> dict[str, Link]:
    """Return the link from every rank to the rank `shift` further, for each of `shifts`, by name ("0>1").

    Rank 0 follows the last rank. As many ranks send at once as have nothing to receive. The result is the same on every
    rank. Raises PeerLost.
    """
    ranks, found = channel.levels.everyone, dict[str, Link]()
    latency = _latency(channel)
    for shift in shifts:
        for i, rate in enumerate(_shifted_rates(channel, shift)):
            found[f"{ranks[i]}>{ranks[(i + shift) % len(ranks)]}"] = Link(latency_s=latency, bytes_per_s=rate)
    return found


def islands_of(rates: Sequence[Sequence[float]]) -> tuple[tuple[int, ...], ...]:
    """Group ranks that reach each other fast into islands, from rates[i][j] (bytes/s from i to j).

    The rates are split at their widest gap, if that is a factor of 2.5 or more; islands are the groups of ranks
    connected by links above it. Where a pair inside such a group is slow all the same, the ranks form no islands, and
    one group is returned.
    """
    ranks = range(len(rates))
    everyone = (tuple(ranks),)
    both = {(i, j): min(rates[i][j], rates[j][i]) for i in ranks for j in ranks if i < j}
    ordered = sorted(both.values())
    gaps = [(high / max(low, 1e-9), low, high) for low, high in pairwise(ordered)]
    if not gaps or max(gaps)[0] < _GAP:
        return everyone
    _, low, high = max(gaps)
    limit = (low * high) ** 0.5
    near = {i: {j for j in ranks if j != i and both[min(i, j), max(i, j)] > limit} | {i} for i in ranks}
    groups = {tuple(sorted(members)) for members in near.values()}
    return tuple(sorted(groups)) if sum(len(g) for g in groups) == len(ranks) else everyone


def ways_of(
    rates: Sequence[Sequence[float]], islands: Sequence[Sequence[int]], *, slowest: float
) -> tuple[dict[int, float], dict[int, float]]:
    """Return (uplinks, downlinks): bandwidth in bytes/s of ranks whose link is much faster than the slowest of all.

    A rank's uplink is as fast as the fastest transfer from it, its downlink as the fastest to it. (So a downlink that
    is faster than every uplink counts as fast as the fastest of those.) Transfers inside islands count for neither. A
    pair is measured alone on its link, unlike in a step: all results are scaled so that the slowest equals `slowest`,
    the bandwidth of all ranks together.
    """
    home = {rank: number for number, island in enumerate(islands) for rank in island}
    every = [(i, j) for i in home for j in home if i != j]
    pairs = [(i, j) for i, j in every if home[i] != home[j]] or every
    out = {r: max(rates[i][j] for i, j in pairs if i == r) for r in home}
    into = {r: max(rates[i][j] for i, j in pairs if j == r) for r in home}
    narrow = min(*out.values(), *into.values())
    found = ({r: slowest * rate / narrow for r, rate in ways.items()} for ways in (out, into))
    wide_out, wide_in = ({r: rate for r, rate in ways.items() if rate > _WIDE * slowest} for ways in found)
    return wide_out, wide_in


def _sides(rates: Sequence[Sequence[float]], islands: Sequence[Sequence[int]]) -> tuple[float, float]:
    """(between, inside): the slowest link of each kind."""
    home = {rank: number for number, island in enumerate(islands) for rank in island}
    inside = [r for i, row in enumerate(rates) for j, r in enumerate(row) if i != j and home[i] == home[j]]
    across = [r for i, row in enumerate(rates) for j, r in enumerate(row) if home[i] != home[j]]
    return min(across), min(inside) if inside else max(across)


def _latency(channel: Channel) -> float:
    """One small message to everybody, there and at once back: its median."""
    pattern = _to_all(channel)
    return median(_agreed(channel, _seconds(channel, pattern, 4)) for _ in range(_SMALL_REPEATS))


def _rate(channel: Channel, pattern: _Pattern) -> float:
    """Bytes per second that the slowest rank sends in this pattern."""
    nbytes = _FIRST_BYTES
    while True:
        seconds = _agreed(channel, _seconds(channel, pattern, nbytes))
        if seconds >= _LONG_ENOUGH_S or nbytes >= _LARGEST_BYTES:
            return nbytes * max(1, sum(pattern.splits)) / seconds
        nbytes = min(_LARGEST_BYTES, nbytes * (4 if seconds < _LONG_ENOUGH_S / 4 else 2))


def _pair_rates(channel: Channel) -> list[list[float]]:
    """rates[i][j], every rank sending to one other at a time."""
    ranks = len(channel.levels.everyone)
    rates = [[float("inf")] * ranks for _ in range(ranks)]
    for shift in range(1, ranks):
        for sender, rate in enumerate(_shifted_rates(channel, shift)):
            rates[sender][(sender + shift) % ranks] = rate
    return rates


def _shifted_rates(channel: Channel, shift: int) -> list[float]:
    """Return the bytes per second from every rank i to rank i + shift, as many at once as have nothing to receive.

    (A rank that also waits for its own message to be sent would count that time for the one that arrives.) Pairs whose
    message took long enough have been measured and send no more; the others send twice as much. The best of some
    repeats counts: other work on a machine can only slow a link down.
    """
    group = channel.levels.everyone
    ranks, me = len(group), group.index(channel.rank)
    rates = [0.0] * ranks
    for senders in turns(ranks, shift):
        left, nbytes = set(senders), _FIRST_BYTES
        while left:
            to = tuple(int(i == (me + shift) % ranks and me in left) for i in range(ranks))
            source = tuple(int(i == (me - shift) % ranks and i in left) for i in range(ranks))
            pattern = _Pattern(to, source)
            times = [
                gathered(channel, [_seconds(channel, pattern, nbytes)]).flatten().tolist() for _ in range(_PAIR_REPEATS)
            ]
            for sender in sorted(left):
                seconds = min(taken[(sender + shift) % ranks] for taken in times)  # timed where it arrived
                if seconds >= _LONG_ENOUGH_S / 3 or nbytes >= _LARGEST_BYTES:
                    rates[sender] = nbytes / seconds
                    left.remove(sender)
            nbytes = min(2 * nbytes, _LARGEST_BYTES)
    return rates


def turns(ranks: int, shift: int) -> list[tuple[int, ...]]:
    """Return the ranks that send at once, turn by turn, when each of `ranks` sends to the rank `shift` further.

    In no turn does a rank send and receive. There are two turns, three where ranks form circles of odd length.
    """
    turn: dict[int, int] = {}
    for first in range(ranks):
        sender, at = first, 0
        while sender not in turn:
            receiver = (sender + shift) % ranks
            turn[sender] = 2 if receiver == first and at == 0 and sender != first else at
            sender, at = receiver, 1 - at
    return [found for n in range(3) if (found := tuple(i for i in sorted(turn) if turn[i] == n))]


def _seconds(channel: Channel, pattern: _Pattern, nbytes: int) -> float:
    """How long this rank needs to send and receive `nbytes` for every share of the pattern, all starting together."""
    gathered(channel, [0.0])  # nobody starts before all are here
    part = torch.zeros(nbytes * max(1, sum(pattern.splits)), dtype=torch.uint8)
    splits, arriving = (tuple(nbytes * n for n in side) for side in (pattern.splits, pattern.arriving))
    began = time.perf_counter()
    channel.start(Message((part[: sum(splits)],), Collective.SHUFFLE, channel.levels.whole, splits, arriving)).wait()
    return max(time.perf_counter() - began, 1e-6)


def _to_all(channel: Channel) -> _Pattern:
    group = channel.levels.everyone
    others = tuple(int(r != channel.rank) for r in group)
    return _Pattern(others, others)


def _agreed(channel: Channel, value: float) -> float:
    """Return the largest value of all ranks, on every rank."""
    return float(gathered(channel, [value]).max())
