"""Measure the bandwidth and latency of the links between ranks, over the channel that the run itself uses.

All ranks call it together, before the first step. The bandwidth of a level, and a hop without its bytes, are measured
while all its ranks send, because a step uses the links like that. Latency is half of a round trip between two ranks.
Which ranks form islands is found from pairs: all of them up to 16 ranks; beyond, pairs of hosts, as `island_search`
says. The messages that a rank sends grow with the logarithm of the ranks, and its memory does not grow. Sizes grow
until a message takes long enough to average out traffic shaping and start-up. Every decision is taken from times that
all ranks have exchanged, so that all of them measure the same things.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from gossamer.comm.channel import Channel, gathered
from gossamer.comm.island_search import (
    GAP,
    PAIRS,
    Groups,
    islands_of,
    islands_of_hosts,
    measured_pairs,
    tournament,
    turns,
    ways_of,
)
from gossamer.comm.link_timing import (
    PEERS,
    Pair,
    Pattern,
    Reading,
    latencies,
    pair_readings,
    pattern_reading,
    place_of,
)
from gossamer.spec.errors import bad_input
from gossamer.spec.network import NO_NETWORK, Link, Network

_RING_TRIPS = 5  # round trips between neighbors
_PAIR_TRIPS = 3  # between the ranks of a pair


def probe(
    channel: Channel, *, ways: bool = False, hosts: Sequence[Sequence[int]] = (), seeks_islands: bool = True
) -> Network:
    """Measure the links and return the network, the same on every rank. Raises PeerLost, BadInput.

    It takes a few seconds on slow links, less on fast ones. `ways`: measure pairs also between two ranks, which are
    never islands, to find unequal uplinks. `hosts`: the ranks of each machine, if known. Beyond 16 ranks, one rank of
    every host is measured for all of them, and islands are whole hosts; without `hosts`, every rank is a host.
    `seeks_islands`: whether to look for islands and unequal uplinks at all.
    """
    everyone = channel.levels.everyone
    if len(everyone) == 1:
        return Network(islands=(everyone,), levels={"all": NO_NETWORK})
    machines = _checked(hosts, everyone) or tuple((rank,) for rank in everyone)
    levels = {"all": _overall(channel)}
    if not seeks_islands or len(everyone) < (2 if ways else 3):
        return Network(islands=(everyone,), levels=levels)
    survey, is_small = _Survey(channel, levels["all"].bytes_per_s), len(everyone) <= PAIRS
    islands = survey.islands_by_pairs() if is_small else survey.islands_by_hosts(machines)
    if not 1 < len(islands) < len(everyone):  # each rank by itself shares a faster link with none
        islands = (everyone,)
    else:
        levels = survey.levels(islands, levels["all"])
    slowest = levels["all"].bytes_per_s
    out, into = ways_of(survey.rates(), islands, slowest=slowest) if is_small else ({}, {})
    uplinks, downlinks = (
        {rank: levels["all"].model_copy(update={"bytes_per_s": rate, "spread": 0.0}) for rank, rate in found.items()}
        for found in (out, into)
    )
    return Network(islands=islands, levels=levels, uplinks=uplinks, downlinks=downlinks)


def neighbors(channel: Channel, shifts: Sequence[int] = (1,)) -> dict[str, Link]:
    """Return the link from every rank to the rank `shift` further, for each of `shifts`, by name ("0>1").

    Rank 0 follows the last rank. As many ranks send at once as have nothing to receive. The result is the same on every
    rank. Raises PeerLost, BadInput.
    """
    ranks, found = channel.levels.everyone, dict[str, Link]()
    for shift in shifts:
        for senders in turns(len(ranks), shift):
            pairs = [(i, (i + shift) % len(ranks)) for i in senders]
            latency_s = latencies(channel, pairs, repeats=_RING_TRIPS, level="neighbors")
            for (a, b), reading in pair_readings(channel, pairs, latency_s, level="neighbors").items():
                found[f"{ranks[a]}>{ranks[b]}"] = _link([latency_s[a, b]], reading)
    return found


def hosts_of(channel: Channel, host: int) -> Groups:
    """Return the ranks of each host, from the number of the host that each rank is on. All ranks call it together."""
    by_host: dict[int, list[int]] = {}
    numbers = gathered(channel, [host])[:, 0].tolist()
    for rank, number in zip(channel.levels.everyone, numbers, strict=True):
        by_host.setdefault(int(number), []).append(rank)
    return tuple(tuple(ranks) for _, ranks in sorted(by_host.items()))


@dataclass(slots=True)
class _Survey:
    """The measured pairs of ranks: seconds of a small message, and bytes/s from the first to the second.

    `least_bytes_per_s`: of a rank while all send. Few pairs are slower, so they begin with messages of that size.
    """

    channel: Channel
    least_bytes_per_s: float
    latency_s: dict[Pair, float] = field(default_factory=dict)
    transfers: dict[Pair, Reading] = field(default_factory=dict)

    def measure(self, pairs: Sequence[Pair]) -> Mapping[Pair, float]:
        """Measure disjoint pairs at once, in both directions; return the bytes/s of the slower one."""
        found = latencies(self.channel, pairs, repeats=_PAIR_TRIPS, level="pairs")
        back = {(b, a): seconds for (a, b), seconds in found.items()}
        self.latency_s |= found
        for way in (found, back):
            self.transfers |= pair_readings(
                self.channel, list(way), way, level="pairs", bytes_per_s=self.least_bytes_per_s
            )
        return {(a, b): self.slower(a, b) for a, b in pairs}

    def slower(self, a: int, b: int) -> float:
        """Return the bytes/s between two ranks in the slower direction: most exchanges need both."""
        return min(self.transfers[a, b].bytes_per_s, self.transfers[b, a].bytes_per_s)

    def islands_by_pairs(self) -> Groups:
        """Measure every pair of ranks and return the islands that their rates show."""
        for pairs in tournament(self.channel.levels.everyone):
            self.measure(pairs)
        return islands_of(self.rates())

    def rates(self) -> list[list[float]]:
        """Return rates[i][j], the bytes/s from i to j, once all pairs are measured."""
        ranks = self.channel.levels.everyone
        return [[self.transfers[a, b].bytes_per_s if a != b else float("inf") for b in ranks] for a in ranks]

    def islands_by_hosts(self, hosts: Groups) -> Groups:
        """Measure pairs of hosts, and one pair of ranks inside every host; return islands of whole hosts."""
        inside = self.measure([(host[0], host[1]) for host in hosts if len(host) > 1])
        across, complete = measured_pairs([host[0] for host in hosts], self.measure)
        found = islands_of_hosts(hosts, across, inside, complete=complete)
        return hosts if len(found) == 1 < len(hosts) and self.is_shared(hosts) else found

    def is_shared(self, hosts: Groups) -> bool:
        """Return whether the ranks of each host share its way out: one by itself may be as fast as inside the host."""
        owners = min(map(len, hosts))
        if owners < 2:
            return False
        patterns = _inside(self.channel, hosts), _across(self.channel, hosts, owners)
        inside, across = (pattern_reading(self.channel, one, level="hosts").bytes_per_s for one in patterns)
        return inside > GAP * across

    def levels(self, islands: Groups, overall: Link) -> dict[str, Link]:
        """Return the links of all ranks, inside islands and between them, each measured while all its ranks send.

        A message between all ranks waits for those that cross from island to island: no latency of `all` is shorter.
        """
        home = {rank: number for number, island in enumerate(islands) for rank in island}
        is_near = {pair: home[pair[0]] == home[pair[1]] for pair in self.latency_s}
        near, far = ([s for pair, s in self.latency_s.items() if is_near[pair] is same] for same in (True, False))
        owners = min(map(len, islands))
        patterns = {
            "island": (near, _inside(self.channel, islands)),
            "between": (far, _across(self.channel, islands, owners)),
        }
        found = {
            level: _link(latencies_s, pattern_reading(self.channel, pattern, level=level))
            for level, (latencies_s, pattern) in patterns.items()
        }
        if owners > 1:
            alone = pattern_reading(self.channel, _across(self.channel, islands, 1), level="between")
            found["between"] = found["between"].model_copy(update={"alone_bytes_per_s": alone.bytes_per_s})
        longest_s = max(overall.latency_s, found["between"].latency_s)
        hop_s = max(overall.hop_s, found["between"].hop_s)
        return {"all": overall.model_copy(update={"latency_s": longest_s, "hop_s": hop_s}), **found}


def _overall(channel: Channel) -> Link:
    """Return the link of all ranks: of messages to all others, and of those from each to the next."""
    found = _link(_ring_latencies(channel), pattern_reading(channel, _to_others(channel), level="all"))
    if len(channel.levels.everyone) < 3:  # the next one is all others
        return found
    ring = _next_of(channel, channel.levels.everyone)
    reading = pattern_reading(channel, ring, level="all", bytes_per_s=found.bytes_per_s)
    return found.model_copy(update={"ring_bytes_per_s": reading.bytes_per_s})


def _ring_latencies(channel: Channel) -> list[float]:
    """Return the one-way seconds of a small message between any two neighbors on the ring of all ranks."""
    ranks = len(channel.levels.everyone)
    found = dict[Pair, float]()
    for senders in turns(ranks, 1):
        pairs = [(i, (i + 1) % ranks) for i in senders]
        found |= latencies(channel, pairs, repeats=_RING_TRIPS, level="all")
    return list(found.values())


def _to_others(channel: Channel) -> Pattern:
    """Return the pattern in which every rank sends to all others, or to `PEERS` of them at even distances."""
    ranks, me = len(channel.levels.everyone), place_of(channel)
    peers = min(PEERS, ranks - 1)
    shifts = [1 + k * (ranks - 1) // peers for k in range(peers)]
    to, source = (tuple((me + way * shift) % ranks for shift in shifts) for way in (1, -1))
    return Pattern(to, source, peers)


def _inside(channel: Channel, islands: Groups) -> Pattern:
    """Return the pattern in which every rank sends to the next one of its island, if it has one."""
    mine = next(island for island in islands if channel.rank in island)
    return _next_of(channel, mine)


def _across(channel: Channel, islands: Groups, owners: int) -> Pattern:
    """Return the pattern in which the k-th rank of every island sends to the k-th of the next, for the first `owners`.

    All islands have so many ranks.
    """
    place = next(island.index(channel.rank) for island in islands if channel.rank in island)
    if place >= owners:
        return Pattern((), ())
    return _next_of(channel, [island[place] for island in islands])


def _next_of(channel: Channel, ring: Sequence[int]) -> Pattern:
    ranks, place = channel.levels.everyone, ring.index(channel.rank)
    after, before = (ranks.index(ring[(place + way) % len(ring)]) for way in (1, -1))
    return Pattern((after,), (before,)) if len(ring) > 1 else Pattern((), ())


def _link(latencies_s: Sequence[float], reading: Reading) -> Link:
    """Return the link of a level whose pairs have these latencies."""
    latency_s = median(latencies_s)
    # At most a round trip of the farthest pair, which all others wait for: beyond, busy processors took it, and what
    # messages take of those is measured by itself.
    hop_s = min(max(latency_s, reading.hop_s), 2 * max(latencies_s))
    return Link(latency_s=latency_s, bytes_per_s=reading.bytes_per_s, spread=reading.spread, hop_s=hop_s)


def _checked(hosts: Sequence[Sequence[int]], everyone: Sequence[int]) -> Groups:
    if hosts and sorted(rank for host in hosts for rank in host) != sorted(everyone):
        raise bad_input(
            wanted=f"a list of the ranks of each host, with every one of {len(everyone)} ranks once",
            got=str([list(host) for host in hosts]),
            do="list the ranks of each host, or give an empty list",
        )
    return tuple(tuple(host) for host in hosts)
