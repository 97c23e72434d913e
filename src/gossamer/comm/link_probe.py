"""Probe: what the links between the ranks can do, measured over the channel the run itself will use.

All ranks call it together, before the first step. What all have together is measured while all of them send, because
that is how a step uses the links; pairs while as many send as have nothing to receive. Sizes grow until a message takes
long enough for shaping and start-up to average out; every decision is taken from times that all ranks have exchanged,
so that all of them measure the same things.
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
_WIDE = 1.5  # by how much a single rank's way out or in must be faster to be told


@dataclass(frozen=True, slots=True)
class _Pattern:
    """Who sends to whom at once: `splits[i]` shares go to rank i of all."""

    splits: tuple[int, ...]
    arriving: tuple[int, ...]


def probe(channel: Channel, *, ways: bool = False) -> Network:
    """Measure; a few seconds on slow links, less on fast ones. Raises PeerLost. The same answer on every rank.

    `ways`: two ranks, which are never islands, measure their pairs as well, to tell the one's way out from the other's.
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
    if len(islands) == 1 or len(islands) == len(everyone):
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


def neighbours(channel: Channel, shifts: Sequence[int] = (1,)) -> dict[str, Link]:
    """The link from every rank to the one so many further ("0>1"; past the last one rank 0 follows), measured while as
    many send as have nothing to receive. The same answer on every rank. Raises PeerLost.
    """
    ranks, found = channel.levels.everyone, dict[str, Link]()
    latency = _latency(channel)
    for shift in shifts:
        for i, rate in enumerate(_shifted_rates(channel, shift)):
            found[f"{ranks[i]}>{ranks[(i + shift) % len(ranks)]}"] = Link(latency_s=latency, bytes_per_s=rate)
    return found


def islands_of(rates: Sequence[Sequence[float]]) -> tuple[tuple[int, ...], ...]:
    """Groups of ranks that reach each other fast, from rates[i][j] (bytes/s from i to j).

    The rates are cut at their widest gap, if that is wide enough; islands are what hangs together above it. Where some
    pair inside such a group is slow all the same, the ranks are no islands, and one group is returned.
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
    """(out, into): bytes/s of the ways of single ranks, where they are much faster than the slowest way of all.

    A rank's way out is as fast as the fastest transfer from it, its way in as the fastest to it (so one that is wider
    than every way out is taken for as wide as the widest of those); inside islands neither is to be seen. Pairs have a
    link for themselves, a step has not: all are scaled so that the slowest way is the one that all ranks had together.
    """
    home = {rank: number for number, island in enumerate(islands) for rank in island}
    pairs = [(i, j) for i in home for j in home if i != j and (len(islands) == 1 or home[i] != home[j])]
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
    """Bytes per second from every member i to member i + shift, as many at once as have nothing to receive meanwhile: a
    rank that waits for its own message to leave would count that as the time of the one that arrives.

    Pairs whose message took long enough have been measured and send no more; the others send twice as much. The best
    of some repeats counts: other work on a machine can only slow a link down.
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
    """Who sends at once, where every one of `ranks` sends to the one `shift` further: in no turn does a rank send and
    receive. Two turns, three where ranks stand in circles of odd length.
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
    """One number for all ranks: the slowest's."""
    return float(gathered(channel, [value]).max())
