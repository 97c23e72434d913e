"""Find islands: which pairs of ranks to measure, and the groups that their rates show. Pure functions.

Up to `PAIRS` nodes every pair is measured, in rounds in which no node is in two pairs. Beyond, pairs are measured
inside groups of `PAIRS` nodes. Then groups are joined two by two: one node of every cluster of one is measured against
one of every cluster of the other. So a node is measured against at most `PAIRS` others at each of log2(nodes) levels. A
node is a host, which its first rank stands for, or a rank where hosts are not known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise, zip_longest

from gossamer.comm.link_timing import Pair

PAIRS = 16  # nodes of which every pair is measured; the most clusters of a group
GAP = 2.5  # links that differ by less are one kind of link
_WIDE = 1.5  # factor by which a rank's uplink or downlink must be faster to be listed

Groups = tuple[tuple[int, ...], ...]
Measure = Callable[[Sequence[Pair]], Mapping[Pair, float]]  # disjoint pairs, to bytes/s of the slower direction


def tournament(nodes: Sequence[int]) -> list[list[Pair]]:
    """Return every pair of `nodes` once, in as few rounds as there can be; no node is in two pairs of a round."""
    seats: list[int | None] = [*nodes, *([None] * (len(nodes) % 2))]
    rounds = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        met = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in met if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


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


def measured_pairs(nodes: Sequence[int], measure: Measure) -> tuple[dict[Pair, float], bool]:
    """Return (rates, complete): the bytes/s of the pairs that tell which nodes are near each other.

    `complete` is False where there are more than `PAIRS` clusters of nodes, of which not all have been compared. While
    all rates are of one kind, a group counts as one cluster: among more nodes than there are islands two are near each
    other, so links of one kind are fast ones.
    """
    groups = [tuple(nodes[at : at + PAIRS]) for at in range(0, len(nodes), PAIRS)]
    found: dict[Pair, float] = {}
    for at_once in zip_longest(*(tournament(group) for group in groups), fillvalue=()):
        found |= measure([pair for pairs in at_once for pair in pairs])
    level = 0
    while len(groups) > 1:
        clusters = [clusters_of(group, found) for group in groups]
        if max(map(len, clusters)) > PAIRS:
            return found, False
        joined = [_crossed(a, b, level) for a, b in zip(clusters[::2], clusters[1::2], strict=False)]
        for at_once in zip_longest(*joined, fillvalue=()):
            found |= measure([pair for pairs in at_once for pair in pairs])
        groups = [sum(groups[at : at + 2], ()) for at in range(0, len(groups), 2)]
        level += 1
    return found, len(nodes) <= PAIRS or len(clusters_of(nodes, found)) <= PAIRS


def clusters_of(nodes: Sequence[int], rates: Mapping[Pair, float]) -> Groups:
    """Return the groups of `nodes` that fast links connect; one group where all rates are of one kind."""
    limit = limit_of(rates.values())
    if limit is None:
        return (tuple(nodes),)
    root = {node: node for node in nodes}

    def first(node: int) -> int:
        while root[node] != node:
            node = root[node]
        return node

    for (a, b), rate in rates.items():
        if rate > limit and a in root and b in root:
            low, high = sorted((first(a), first(b)))
            root[high] = low
    groups: dict[int, list[int]] = {}
    for node in nodes:
        groups.setdefault(first(node), []).append(node)
    return tuple(tuple(group) for group in groups.values())


def limit_of(rates: Iterable[float]) -> float | None:
    """Return the rate that parts slow links from fast ones, in the middle of the widest gap; None without a gap."""
    gaps = [(high / max(low, 1e-9), low, high) for low, high in pairwise(sorted(rates))]
    if not gaps or max(gaps)[0] < GAP:
        return None
    _, low, high = max(gaps)
    return float((low * high) ** 0.5)


def islands_of_hosts(
    hosts: Sequence[Sequence[int]], across: Mapping[Pair, float], inside: Mapping[Pair, float], *, complete: bool = True
) -> Groups:
    """Return the islands of all ranks, assembled of whole hosts; one group of all ranks where there are none.

    across: bytes/s between the first ranks of two hosts, of the slower direction. inside: between two ranks of one
    host. `complete`: whether `across` has compared all hosts, directly or through hosts near to them.
    """
    everyone = (tuple(sorted(rank for host in hosts for rank in host)),)
    rates = {**across, **inside}
    if not complete:
        far = not inside or min(inside.values()) < GAP * max(across.values())
        return everyone if far else _sorted(hosts)
    limit = limit_of(rates.values())
    if limit is None:
        return everyone
    clusters = clusters_of([host[0] for host in hosts], rates)
    home = {node: number for number, cluster in enumerate(clusters) for node in cluster}
    if any(rate <= limit and home[a] == home[b] for (a, b), rate in across.items()):
        return everyone  # connected through others, and slow all the same
    if len(clusters) == len(hosts) and min(inside.values(), default=0.0) <= limit:
        return everyone  # hosts share a faster link with none, nor do the ranks of each
    ranks = {host[0]: tuple(host) for host in hosts}
    return _sorted([sum((ranks[node] for node in cluster), ()) for cluster in clusters])


def islands_of(rates: Sequence[Sequence[float]]) -> Groups:
    """Group ranks that reach each other fast into islands, from rates[i][j] (bytes/s from i to j).

    A pair is as fast as its slower direction. The rates are split at their widest gap, if that is a factor of 2.5 or
    more; islands are the groups of ranks connected by links above it. Where a pair inside such a group is slow all the
    same, the ranks form no islands, and one group is returned.
    """
    ranks = range(len(rates))
    both = {(i, j): min(rates[i][j], rates[j][i]) for i in ranks for j in ranks if i < j}
    return islands_of_hosts([(rank,) for rank in ranks], both, {}) if both else (tuple(ranks),)


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


def _crossed(here: Groups, there: Groups, level: int) -> list[list[Pair]]:
    """Return the pairs of one node of every cluster `here` and one of every cluster `there`, in rounds.

    Another node of a cluster stands for it at every level, so that no node is measured at all of them.
    """
    a, b = ([cluster[level % len(cluster)] for cluster in side] for side in (here, there))
    rounds = range(max(len(a), len(b)))
    both = [[(i, (i + shift) % len(rounds)) for i in range(len(a))] for shift in rounds]
    return [[(a[i], b[j]) for i, j in pairs if j < len(b)] for pairs in both]


def _sorted(groups: Sequence[Sequence[int]]) -> Groups:
    return tuple(sorted(tuple(sorted(group)) for group in groups))
