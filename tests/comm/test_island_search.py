"""Which pairs are measured and which islands they show: pure functions, on made-up tables of rates."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import pytest

from gossamer.comm import island_search
from gossamer.comm.island_search import PAIRS, islands_of, islands_of_hosts, measured_pairs, tournament
from gossamer.comm.link_timing import Pair

INSIDE, BETWEEN, OWN_HOST = 1e9, 5e6, 2e10
PLACES: dict[str, Callable[[int, int, int], int]] = {
    "one after the other": lambda node, nodes, sites: node * sites // nodes,
    "by turns": lambda node, nodes, sites: node % sites,
    "anywhere": lambda node, nodes, sites: random.Random(node * 7 + sites).randrange(sites) if node >= sites else node,
}


class Table:
    """Rates of pairs, up to a half more or less by chance, and how often each node was measured."""

    def __init__(self, site: Sequence[int], *, inside: float = INSIDE, between: float = BETWEEN) -> None:
        self.site, self.inside, self.between = site, inside, between
        self.asked: Counter[int] = Counter()
        self.draw = random.Random(0)

    def measure(self, pairs: Sequence[Pair]) -> Mapping[Pair, float]:
        met = [node for pair in pairs for node in pair]
        assert len(set(met)) == len(met), "a node is in two pairs at once"
        self.asked.update(met)
        return {pair: self.rate(*pair) * self.draw.uniform(0.67, 1.5) for pair in pairs}

    def rate(self, a: int, b: int) -> float:
        return self.inside if self.site[a] == self.site[b] else self.between


def sites_of(site: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    return tuple(sorted(tuple(r for r, one in enumerate(site) if one == number) for number in set(site)))


@pytest.mark.parametrize("nodes", [2, 3, 4, 7, 16])
def test_a_tournament_has_every_pair_once_in_rounds_of_disjoint_pairs(nodes: int) -> None:
    rounds = tournament(range(nodes))
    assert sorted(p for pairs in rounds for p in pairs) == [(a, b) for a in range(nodes) for b in range(a + 1, nodes)]
    assert all(len({n for p in pairs for n in p}) == 2 * len(pairs) for pairs in rounds)
    assert len(rounds) == nodes - 1 + nodes % 2


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
@pytest.mark.parametrize("sites", [2, 3, 15])
@pytest.mark.parametrize("nodes", [17, 64, 1024])
def test_sites_are_found_wherever_their_hosts_stand(nodes: int, sites: int, place) -> None:
    """And no host is measured more often than the logarithm of their number allows."""
    site = [place(node, nodes, sites) for node in range(nodes)]
    table = Table(site)
    across, complete = measured_pairs(range(nodes), table.measure)
    assert complete and islands_of_hosts([(n,) for n in range(nodes)], across, {}) == sites_of(site)
    assert max(table.asked.values()) <= PAIRS - 1 + PAIRS * math.ceil(math.log2(nodes / PAIRS))


@pytest.mark.parametrize("nodes", [2, 17, 64, 1024])
@pytest.mark.parametrize("rate", [INSIDE, BETWEEN])
def test_links_of_one_kind_are_no_islands(nodes: int, rate: float) -> None:
    table = Table([0] * nodes, inside=rate)
    across, _ = measured_pairs(range(nodes), table.measure)
    assert islands_of_hosts([(n,) for n in range(nodes)], across, {}) == (tuple(range(nodes)),)


@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("hosts", [2, 17, 64, 512])
def test_hosts_of_several_ranks_are_islands_where_the_network_is_one(hosts: int, size: int) -> None:
    """Pairs of ranks are not measured: one pair of every host stands for it."""
    ranks = [tuple(range(size * h, size * (h + 1))) for h in range(hosts)]
    table = Table(range(hosts * size), between=INSIDE)
    across, complete = measured_pairs([host[0] for host in ranks], table.measure)
    inside = {(host[0], host[1]): OWN_HOST for host in ranks}
    assert islands_of_hosts(ranks, across, inside, complete=complete) == tuple(ranks)
    alike = dict.fromkeys(inside, INSIDE)
    assert islands_of_hosts(ranks, across, alike, complete=complete) == (tuple(range(hosts * size)),)


def test_sites_of_hosts_hold_all_ranks_of_their_hosts() -> None:
    """1,024 ranks on 128 hosts of two sites; ranks of one host need not have numbers side by side."""
    hosts = [tuple(range(h, 1024, 128)) for h in range(128)]
    table = Table([rank % 2 for rank in range(1024)])
    across, complete = measured_pairs([host[0] for host in hosts], table.measure)
    inside = {(host[0], host[1]): 2 * INSIDE for host in hosts}
    found = islands_of_hosts(hosts, across, inside, complete=complete)
    assert found == (tuple(range(0, 1024, 2)), tuple(range(1, 1024, 2)))


@pytest.mark.parametrize("place", ["one after the other", "anywhere"])
def test_more_sites_than_are_compared_are_never_guessed(place: str) -> None:
    """Hosts are then islands if their own links are faster than all others; else all ranks are one group."""
    hosts = [(2 * h, 2 * h + 1) for h in range(128)]
    table = Table([PLACES[place](rank // 2, 128, 40) for rank in range(256)])
    across, complete = measured_pairs([host[0] for host in hosts], table.measure)
    assert not complete and max(table.asked.values()) <= PAIRS - 1 + 3 * PAIRS
    for own, wanted in ((100 * INSIDE, tuple(hosts)), (INSIDE, (tuple(range(256)),))):
        inside = dict.fromkeys(hosts, own)
        assert islands_of_hosts(hosts, across, inside, complete=complete) == wanted
    assert islands_of_hosts(hosts, across, {}, complete=complete) == (tuple(range(256)),)


def test_a_host_of_one_rank_is_an_island_beside_others_of_several() -> None:
    hosts = [(0, 1), (2,), (3, 4)]
    across = {(0, 2): 1e6, (0, 3): 1.1e6, (2, 3): 1e6}
    assert islands_of_hosts(hosts, across, {(0, 1): 1e9, (3, 4): 1e9}) == ((0, 1), (2,), (3, 4))
    assert islands_of_hosts(hosts, across, {(0, 1): 1e9, (3, 4): 1.2e6}) == (tuple(range(5)),), "one is slow in itself"


def test_hosts_that_are_connected_through_others_but_slow_are_no_island() -> None:
    across = {(0, 1): 1e9, (1, 2): 1e9, (0, 2): 1e6, (0, 3): 1e6, (1, 3): 1e6, (2, 3): 1e6}
    assert islands_of_hosts([(n,) for n in range(4)], across, {}) == ((0, 1, 2, 3),)


def test_a_pair_is_as_fast_as_its_slower_direction() -> None:
    """0 and 1 send fast to each other; 2 hears both fast, and sends slowly to both."""
    rates = [[1e9] * 3 for _ in range(3)]
    rates[2] = [1e6, 1e6, 1e9]
    assert islands_of(rates) == ((0, 1), (2,))


def test_one_node_and_a_rate_of_zero_are_no_error() -> None:
    assert islands_of([[math.inf]]) == ((0,),)
    assert islands_of([[1e9 if (i < 2) is (j < 2) else 0.0 for j in range(4)] for i in range(4)]) == ((0, 1), (2, 3))


def test_joining_compares_every_cluster_with_every_other_once() -> None:
    here, there = ((0, 4), (1,), (2, 3)), ((10,), (11, 12))
    for level, a, b in ((0, [0, 1, 2], [10, 11]), (1, [4, 1, 3], [10, 12])):
        rounds = island_search._crossed(here, there, level)
        assert sorted(p for pairs in rounds for p in pairs) == sorted((x, y) for x in a for y in b)
        assert all(len({n for p in pairs for n in p}) == 2 * len(pairs) for pairs in rounds)
