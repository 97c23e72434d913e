"""What ranks measure together: over channels of one process, with links whose times are made up."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from gossamer.comm import link_probe, link_timing
from gossamer.comm.channel import gathered
from gossamer.comm.channel.local import LocalChannel
from gossamer.comm.link_probe import hosts_of, neighbors, probe
from gossamer.comm.link_timing import LARGEST_BYTES, PEERS, Pattern, Reading, pattern_reading, place_of
from gossamer.spec.errors import BadInput
from gossamer.spec.network import Link, Network

FAST = Link(latency_s=1e-4, bytes_per_s=1e9, hop_s=1.5e-4)
SLOW = Link(latency_s=2e-2, bytes_per_s=5e6, hop_s=4e-2)  # as over gloo


@dataclass
class Links:
    """Links whose times are looked up. `link(a, b)`: from a to b; `late(rank, reading)`: a factor of one reading."""

    link: Callable[[int, int], Link]
    late: Callable[[int, int], float] = lambda rank, reading: 1.0
    trip: Callable[[int, int], float] = lambda rank, reading: 1.0
    readings: dict[int, int] = field(default_factory=dict)
    trips: dict[int, int] = field(default_factory=dict)
    held: list[int] = field(default_factory=list)

    def pulled(self, channel: LocalChannel, pairs: Sequence[tuple[int, int]], nbytes: int) -> float:
        me = place_of(channel)
        pair = next(((a, b) for a, b in pairs if b == me), None)
        if pair is None:
            return 0.0
        there, back = self.link(*pair), self.link(pair[1], pair[0])
        seconds = there.latency_s + nbytes / there.bytes_per_s
        return back.latency_s + seconds * self._count(me)

    def round_trip(self, channel: LocalChannel, pair: tuple[int, int]) -> float:
        self.trips[pair[0]] = self.trips.get(pair[0], -1) + 1
        both = self.link(*pair).latency_s + self.link(pair[1], pair[0]).latency_s
        return both * self.trip(pair[0], self.trips[pair[0]]) if place_of(channel) == pair[0] else 0.0

    def together(self, channel: LocalChannel, pattern: Pattern, nbytes: int) -> float:
        me = place_of(channel)
        self.held.append(nbytes * max(len(pattern.to), len(pattern.source)))
        ways = ([self.link(me, r) for r in pattern.to], [self.link(r, me) for r in pattern.source])
        hop_s = max((one.hop_s for way in ways for one in way), default=0.0)
        if nbytes == 1:
            return hop_s
        slowest = max(sum(nbytes / one.bytes_per_s for one in way) for way in ways)
        return (hop_s + slowest) * self._count(me)

    def _count(self, me: int) -> float:
        self.readings[me] = self.readings.get(me, -1) + 1
        return self.late(me, self.readings[me])


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch):
    """Run a function on every rank, each in a thread of its own, with the times of made-up links."""

    def run(ranks: int, links: Links | None, what: Callable[[LocalChannel], object]) -> list:
        if links is not None:
            monkeypatch.setattr(link_timing, "_pulled_s", links.pulled)
            monkeypatch.setattr(link_timing, "_round_trip_s", links.round_trip)
            monkeypatch.setattr(link_timing, "_together_s", links.together)
        channels = LocalChannel.world(ranks, patience_s=60.0)
        with ThreadPoolExecutor(ranks) as pool:
            return list(pool.map(what, channels))

    return run


def sites(size: int) -> Callable[[int, int], Link]:
    return lambda a, b: FAST if a // size == b // size else SLOW


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 16, 33])
def test_every_rank_gets_the_rows_of_all_in_few_messages(on, ranks: int) -> None:
    def gather(channel: LocalChannel) -> tuple[list[list[float]], int]:
        return gathered(channel, [channel.rank, 0.5]).tolist(), channel.meter.messages

    for rows, messages in on(ranks, None, gather):
        assert rows == [[r, 0.5] for r in range(ranks)] and messages == math.ceil(math.log2(ranks))


def test_not_a_number_passes_through_a_gather(on) -> None:
    rows = on(3, None, lambda channel: gathered(channel, [math.nan if channel.rank == 1 else 1.0])[:, 0].tolist())
    assert all(math.isnan(row[1]) and row[0] == row[2] == 1.0 for row in rows)


@pytest.mark.parametrize("ranks", [4, 6, 16])
def test_every_level_has_its_own_latency_and_bandwidth(on, ranks: int) -> None:
    """Inside a site no message waits as long as on the line between sites."""
    found = on(ranks, Links(sites(ranks // 2)), probe)
    assert all(one == found[0] for one in found)
    assert found[0].islands == (tuple(range(ranks // 2)), tuple(range(ranks // 2, ranks)))
    island, between = found[0].levels["island"], found[0].levels["between"]
    assert island.latency_s == pytest.approx(1e-4) and between.latency_s == pytest.approx(2e-2)
    assert island.bytes_per_s == pytest.approx(1e9) and between.bytes_per_s == pytest.approx(5e6)
    assert found[0].levels["all"].latency_s == pytest.approx(2e-2), "messages between all wait for the line"
    hops = {level: link.hop_s for level, link in found[0].levels.items()}
    assert hops == pytest.approx({"island": 1.5e-4, "between": 4e-2, "all": 4e-2})
    assert between.alone_bytes_per_s == pytest.approx(5e6), "each of these ranks has a way of its own"


def test_a_hop_takes_a_round_trip_at_most(on) -> None:
    """What it takes longer is busy processors'."""
    busy = Link(latency_s=1e-3, bytes_per_s=1e7, hop_s=9e-3)
    assert [one.levels["all"].hop_s for one in on(2, Links(lambda a, b: busy), probe)] == pytest.approx([2e-3] * 2)


@pytest.mark.parametrize("near", [8, 4])
def test_a_hop_of_all_is_that_of_the_farthest(on, near: int) -> None:
    """Two sites whose islands nobody asks for, and one far rank on a link as fast: most neighbors are near."""
    far = Link(latency_s=2e-2, bytes_per_s=1e9, hop_s=4e-2)
    ranks, links = (16, Links(sites(8))) if near == 8 else (5, Links(lambda a, b: FAST if max(a, b) < near else far))
    found = on(ranks, links, lambda channel: probe(channel, seeks_islands=False))
    assert all(one == found[0] for one in found)
    assert found[0].levels["all"].hop_s == pytest.approx(4e-2)


@pytest.mark.parametrize(("ranks", "known"), [(20, False), pytest.param(36, True, marks=pytest.mark.nightly)])
def test_beyond_sixteen_ranks_sites_are_found_of_hosts(on, ranks: int, known: bool) -> None:
    """With hosts of two ranks and without; what a rank sends at once has a bound that ranks do not raise."""
    links = Links(sites(ranks // 2))
    hosts = [(r, r + 1) for r in range(0, ranks, 2)] if known else []
    counted = {}

    def survey(channel: LocalChannel) -> Network:
        network = probe(channel, hosts=hosts)
        counted[channel.rank] = channel.meter.messages
        return network

    found = on(ranks, links, survey)
    assert all(one == found[0] for one in found)
    assert found[0].islands == (tuple(range(ranks // 2)), tuple(range(ranks // 2, ranks)))
    assert found[0].levels["island"].latency_s == pytest.approx(1e-4)
    assert found[0].levels["between"].latency_s == pytest.approx(2e-2)
    assert not found[0].uplinks and max(links.held) <= LARGEST_BYTES
    gathers = max(counted.values()) / math.ceil(math.log2(ranks))
    assert gathers < 30 * (16 + 16 * math.log2(ranks / 16)), "of the pairs at every level, not of ranks"


def test_hosts_are_islands_where_only_their_own_links_are_fast(on) -> None:
    hosts = [tuple(range(h, 24, 3)) for h in range(3)]
    links = Links(lambda a, b: FAST if a % 3 == b % 3 else SLOW)
    assert {one.islands for one in on(24, links, lambda channel: probe(channel, hosts=hosts))} == {tuple(hosts)}


@dataclass
class SharedLinks(Links):
    """Links of hosts whose ranks share one way out, of which one rank by itself has all."""

    host: int = 1  # ranks of each

    def together(self, channel: LocalChannel, pattern: Pattern, nbytes: int) -> float:
        me, ranks, alone_s = place_of(channel), len(channel.levels.everyone), super().together(channel, pattern, nbytes)
        mine, shifts = me // self.host, [peer - me for peer in pattern.to]

        def crosses(rank: int) -> bool:
            return any((rank + shift) % ranks // self.host != mine for shift in shifts)

        if nbytes == 1 or not crosses(me):
            return alone_s
        return alone_s * sum(map(crosses, range(mine * self.host, (mine + 1) * self.host)))


def test_hosts_whose_ranks_share_a_way_out_are_islands(on) -> None:
    """Two ranks reach each other as fast across hosts as inside one, as long as no other sends."""
    hosts = [tuple(range(10)), tuple(range(10, 20))]
    shared, own = SharedLinks(lambda a, b: FAST, host=10), Links(lambda a, b: FAST)
    for links, islands in ((shared, tuple(hosts)), (own, (tuple(range(20)),))):
        assert {one.islands for one in on(20, links, lambda channel: probe(channel, hosts=hosts))} == {islands}


def test_a_ring_is_measured_as_a_ring(on) -> None:
    """Of each host's four ranks one has its next on the other host, and the way out by itself."""
    for network in on(8, SharedLinks(lambda a, b: FAST, host=4), lambda channel: probe(channel, seeks_islands=False)):
        link = network.levels["all"]
        assert link.bytes_per_s == pytest.approx(2.5e8, rel=0.1) and link.ring_bytes_per_s == pytest.approx(
            1e9, rel=0.1
        )


@pytest.mark.parametrize("latency_s", [1e-3, 0.1])
def test_pairs_of_far_ranks_are_measured_with_few_messages(on, latency_s: float) -> None:
    """What all ranks send together says with how many bytes a pair begins: its readings are two, and few are more."""
    link = Link(latency_s=latency_s, bytes_per_s=4e6, hop_s=2 * latency_s)
    counted = {}

    def survey(channel: LocalChannel) -> Network:
        network = probe(channel)
        counted[channel.rank] = channel.meter.messages
        return network

    assert {one.islands for one in on(8, Links(lambda a, b: link), survey)} == {(tuple(range(8)),)}
    gathers = max(counted.values()) / math.log2(8)
    assert gathers < 7 * (1 + 2 * 2) + 40, "seven rounds of a latency and two readings each way, and those of all"


def test_hosts_must_hold_every_rank_once(on) -> None:
    with pytest.raises(BadInput, match=r"every one of 3 ranks once, got \[\[0, 1\]\]"):
        on(3, Links(sites(3)), lambda channel: probe(channel, hosts=[(0, 1)]))


def test_the_ranks_of_a_host_are_known_by_its_number(on) -> None:
    assert on(5, None, lambda channel: hosts_of(channel, (7, 2, 7, 2, 9)[channel.rank])) == [((1, 3), (0, 2), (4,))] * 5


@pytest.mark.parametrize("ranks", [2, 17, 40])
def test_all_ranks_together_hold_no_more_with_more_ranks(on, ranks: int) -> None:
    """Everybody sends as much as it receives, to ranks near and far, and never more than the budget."""
    links = Links(lambda a, b: FAST)
    patterns = on(ranks, links, lambda channel: link_probe._to_others(channel))
    assert all(len(set(p.to)) == len(p.to) == p.shares == min(PEERS, ranks - 1) for p in patterns)
    assert all(rank not in p.to for rank, p in enumerate(patterns))
    assert all(rank in patterns[peer].source for rank, p in enumerate(patterns) for peer in p.to)
    on(ranks, links, lambda channel: probe(channel, seeks_islands=False))
    assert LARGEST_BYTES // 2 < max(links.held) <= LARGEST_BYTES


@pytest.mark.parametrize("ranks", [3, 20])
def test_a_link_that_is_slow_in_one_direction_is_slow(on, ranks: int) -> None:
    """To site 1 all is fast, from it nothing is: exchanges need both."""
    half = ranks // 2 + ranks % 2
    links = Links(lambda a, b: SLOW if a >= half > b else FAST)
    (found,) = set(map(Network.model_dump_json, on(ranks, links, probe)))
    network = Network.model_validate_json(found)
    assert network.islands == (tuple(range(half)), tuple(range(half, ranks)))
    assert network.levels["between"].bytes_per_s == pytest.approx(5e6, rel=0.1)


@pytest.mark.parametrize("slow", [0, 2])
@pytest.mark.parametrize("direction", ["out", "in"])
def test_the_slowest_rank_says_what_all_can_do(on, slow: int, direction: str) -> None:
    links = Links(lambda a, b: SLOW if (a if direction == "out" else b) == slow else FAST)
    for network in on(4, links, lambda channel: probe(channel, seeks_islands=False)):
        assert network.levels["all"].bytes_per_s == pytest.approx(5e6, rel=0.1)


def test_one_late_message_is_not_the_latency(on) -> None:
    """Of a pair's round trips the fastest counts, of the pairs their median."""
    far = Link(latency_s=0.3, bytes_per_s=1e9)
    links = Links(lambda a, b: far if {a, b} == {2, 3} else FAST, trip=lambda rank, n: 500.0 if n % 5 == rank else 1.0)
    for network in on(6, links, lambda channel: probe(channel, seeks_islands=False)):
        assert network.levels["all"].latency_s == pytest.approx(1e-4)


def test_neighbors_have_a_latency_each(on) -> None:
    links = Links(lambda a, b: SLOW if (a, b) == (1, 2) else FAST)
    (found, *others) = on(3, links, neighbors)
    assert found == others[0] == others[1] and set(found) == {"0>1", "1>2", "2>0"}
    assert found["1>2"].bytes_per_s == pytest.approx(5e6) and found["0>1"].bytes_per_s == pytest.approx(1e9)
    assert found["1>2"].latency_s == pytest.approx((2e-2 + 1e-4) / 2), "half of there and back"
    assert found["2>0"].latency_s == pytest.approx(1e-4)


@pytest.mark.parametrize("latency_s", [1e-4, 0.02, 0.1])
def test_latency_is_no_bandwidth(on, latency_s: float) -> None:
    """A small message over a long line takes long, which says nothing of the line's bandwidth."""
    link = Link(latency_s=latency_s, bytes_per_s=1.25e6)
    for network in on(3, Links(lambda a, b: link), lambda channel: probe(channel, ways=True)):
        assert network.levels["all"].bytes_per_s == pytest.approx(1.25e6, rel=0.01)
        assert network.levels["all"].latency_s == pytest.approx(latency_s)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_a_time_that_is_none_is_refused_with_level_and_rank(on, bad: float) -> None:
    links = Links(sites(4), late=lambda rank, n: bad if rank == 2 else 1.0)

    def said(channel: LocalChannel) -> str:
        with pytest.raises(BadInput) as caught:
            probe(channel)
        return str(caught.value)

    (message,) = set(on(4, links, said))
    assert "(process group 'all'), got" in message and "on rank 2" in message and message.startswith("plan.exchange: ")


@pytest.mark.parametrize("level", ["all", "neighbors"])
def test_readings_that_differ_are_repeated_once_and_said(on, level: str) -> None:
    """The fastest counts, since other work only slows; a message then names the spread."""
    ask = neighbors if level == "neighbors" else lambda channel: probe(channel, seeks_islands=False).levels
    steady, noisy = Links(lambda a, b: SLOW), Links(lambda a, b: SLOW, late=lambda rank, n: (1.0, 2.0)[n % 2])
    calm = on(2, steady, ask)[0]
    rough = on(2, noisy, ask)[0]
    assert all(link.spread < 0.01 for link in calm.values())
    assert sum(noisy.readings.values()) > sum(steady.readings.values()), "two readings more"
    for link in rough.values():
        assert link.bytes_per_s == pytest.approx(5e6, rel=0.2) and 0.7 < link.spread < 1.3
        assert "Mbit/s (readings differ by " in link.show() and link.show().endswith("%), 20.0 ms")


@pytest.mark.parametrize("repeated", [(1.5, 1.5), (1.5, 0.005)])
def test_a_repeated_reading_joins_those_before(on, repeated: tuple[float, float]) -> None:
    """Two of the repeated ones are slower than the fastest before: that one counts, and the spread is of all four.

    A shaper that has rested lets a message through at once, which says nothing of the link.
    """
    link = Link(latency_s=0.0, bytes_per_s=5e4)  # so slow that the first message takes long enough
    pairs = Links(lambda a, b: link, late=lambda rank, n: (1.0, 2.0, *repeated)[n])
    together = Links(lambda a, b: link, late=lambda rank, n: (1.0, 2.0, *repeated)[n])
    found = [
        on(2, pairs, lambda ch: link_timing.pair_readings(ch, [(0, 1)], {(0, 1): 0.0}, level="x")[0, 1]),
        on(2, together, lambda ch: pattern_reading(ch, Pattern((1 - ch.rank,), (1 - ch.rank,)), level="x")),
    ]
    for reading in (one for each in found for one in each):
        assert reading.bytes_per_s == pytest.approx(5e4) and reading.spread == pytest.approx(1.0)
    assert pairs.readings[1] == together.readings[1] == 3, "four readings, no more"


def test_a_reading_is_its_fastest_without_the_way() -> None:
    reading = Reading.of(1_000_000, [1.5, 2.5, 1.1], latency_s=0.1)
    assert reading.bytes_per_s == pytest.approx(1e6) and reading.spread == pytest.approx(1.4)
    assert Reading.of(100, [1e-9], latency_s=1.0).bytes_per_s == pytest.approx(1e8), "no time is less than clocks tell"


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf])
def test_a_link_has_a_finite_bandwidth(rate: float) -> None:
    with pytest.raises(ValueError, match="wanted a finite bandwidth above 0 bytes/s, got"):
        Link(latency_s=0.0, bytes_per_s=rate)


@pytest.mark.parametrize("latency_s", [-1e-9, math.nan, math.inf])
def test_a_link_has_a_finite_latency(latency_s: float) -> None:
    with pytest.raises(ValueError, match="wanted a finite latency of 0 s or more, got"):
        Link(latency_s=latency_s, bytes_per_s=1.0)
    with pytest.raises(ValueError, match="wanted a finite spread of 0 or more, got"):
        Link(latency_s=0.0, bytes_per_s=1.0, spread=latency_s)


def test_networks_written_before_spreads_can_be_read() -> None:
    written = '{"islands":[[0,1]],"levels":{"all":{"latency_s":0.01,"bytes_per_s":12500000.0}}}'
    network = Network.model_validate_json(written)
    assert network.levels["all"].spread == 0.0 and network.levels["all"].show() == "100 Mbit/s, 10.0 ms"
    assert Link(latency_s=0.01, bytes_per_s=12.5e6, spread=0.4).show() == (
        "100 Mbit/s (readings differ by 40%), 10.0 ms"
    )
