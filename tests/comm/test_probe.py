"""The probe: what it makes of measured rates, and that all ranks come to one answer over real processes and links."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gossamer.comm.channel.local import LocalChannel
from gossamer.comm.island_search import islands_of, turns, ways_of
from gossamer.comm.link_probe import probe
from gossamer.netlab import Lab, LabTopology, lab_unavailable
from gossamer.spec.network import Link, Network

MBIT = 1e6 / 8


def matrix(ranks: int, rate) -> list[list[float]]:
    return [[rate(i, j) for j in range(ranks)] for i in range(ranks)]


def test_two_sites_are_two_islands() -> None:
    site = (0, 1, 0, 1, 1)
    rates = matrix(5, lambda i, j: 1e9 + i if site[i] == site[j] else 5e6 + j)
    assert islands_of(rates) == ((0, 2), (1, 3, 4))


def test_links_that_differ_little_are_no_islands() -> None:
    assert islands_of(matrix(4, lambda i, j: 1e8 * (1 + 0.5 * ((i + j) % 2)))) == ((0, 1, 2, 3),)


def test_one_slow_rank_is_an_island_of_its_own() -> None:
    rates = matrix(4, lambda i, j: 1e6 if 3 in (i, j) else 1e8)
    assert islands_of(rates) == ((0, 1, 2), (3,))


def test_a_slow_pair_inside_a_chain_of_fast_ones_makes_no_islands() -> None:
    """0-1 and 1-2 are fast, 0-2 is slow: no group in which all reach all fast, so none is claimed."""
    rates = matrix(3, lambda i, j: 1e6 if {i, j} == {0, 2} else 1e8)
    assert islands_of(rates) == ((0, 1, 2),)


def test_a_rank_with_a_wide_way_out_is_told() -> None:
    """From i to j goes what i's way out and j's way in let through; the slowest way is what all had together."""
    up, down = (1e6, 2e6, 9e6, 1.2e6), (20e6, 20e6, 20e6, 20e6)
    rates = matrix(4, lambda i, j: min(up[i], down[j]))
    out, into = ways_of(rates, ((0, 1, 2, 3),), slowest=0.5e6)
    assert out == pytest.approx({1: 1e6, 2: 4.5e6}), "scaled by a half; 1.2 is not much faster than 1"
    assert into == pytest.approx({0: 4.5e6, 1: 4.5e6, 3: 4.5e6, 2: 1e6}), "no wider than the widest way out shows"


def test_equal_ways_are_no_exceptions_and_those_inside_islands_say_nothing() -> None:
    assert ways_of(matrix(3, lambda i, j: 1e8 * (1 + 0.1 * i)), ((0, 1, 2),), slowest=1e8) == ({}, {})
    home = (0, 0, 1, 1)
    rates = matrix(4, lambda i, j: 1e9 * (1 + i) if home[i] == home[j] else 5e6)
    assert ways_of(rates, ((0, 1), (2, 3)), slowest=2e6) == ({}, {})


def test_a_way_that_is_slow_in_one_direction_is_slow() -> None:
    """An exchange goes both ways: who sends fast to a site and hears slowly from it is no part of it."""
    site = (0, 0, 1, 1)
    rates = matrix(4, lambda i, j: 1e6 if site[i] > site[j] else 1e9)
    assert islands_of(rates) == ((0, 1), (2, 3))


@pytest.mark.parametrize("ranks", range(2, 10))
def test_who_sends_has_nothing_to_receive_meanwhile(ranks: int) -> None:
    for shift in range(1, ranks):
        found = turns(ranks, shift)
        assert sorted(i for senders in found for i in senders) == list(range(ranks)) and len(found) <= 3
        assert all((i + shift) % ranks not in senders for senders in found for i in senders)


def test_one_rank_needs_no_wire() -> None:
    (channel,) = LocalChannel.world(1)
    links = probe(channel)
    assert links.islands == ((0,),) and links.levels["all"].seconds(1e6) < 1e-3 and channel.meter.total_bytes == 0


def test_a_link_says_how_long_bytes_take() -> None:
    assert Link(latency_s=0.01, bytes_per_s=1e6).seconds(2e6, hops=3) == pytest.approx(2.03)
    assert Link(latency_s=0.01, bytes_per_s=1e6, hop_s=0.02).seconds(2e6, hops=3) == pytest.approx(2.06)


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_measure_the_same_links(pool, ranks: int) -> None:
    answers = pool.run("comm.jobs:probe_links", ranks)
    assert all(a == answers[0] for a in answers)
    links = Network.model_validate(answers[0])
    assert links.ranks == ranks and links.levels["all"].bytes_per_s > 1e6


def found_in(topology: LabTopology) -> list[Network]:
    """What all hosts find: by all pairs, and by groups of hosts."""
    with Lab(topology) as lab:
        program = [sys.executable, str(Path(__file__).with_name("lab_probe.py"))]
        hosts = [
            lab.spawn(h, [*program, str(h), str(topology.hosts), lab.address(0)], stdout=subprocess.PIPE)
            for h in range(topology.hosts)
        ]
        said = [host.communicate(timeout=100)[0].splitlines()[-2:] for host in hosts]
    assert all(one == said[0] for one in said)
    return [Network.model_validate(json.loads(line)) for line in said[0]]


@pytest.mark.lab
@pytest.mark.skipif(lab_unavailable() is not None, reason=str(lab_unavailable()))
def test_in_the_laboratory_the_shaped_links_are_found() -> None:
    """Four hosts on two islands: 160 Mbit/s inside; 20 Mbit/s between, shared by the two ranks of an island."""
    topology = LabTopology(4, rate_bytes_per_s=160 * MBIT, islands=(2, 2), between_bytes_per_s=20 * MBIT)
    for found in found_in(topology):
        assert found.islands == ((0, 1), (2, 3))
        assert found.levels["between"].bytes_per_s == pytest.approx(10 * MBIT, rel=0.35)
        ratio = found.levels["island"].bytes_per_s / found.levels["between"].bytes_per_s
        assert ratio == pytest.approx(16, rel=0.5)


@pytest.mark.lab
@pytest.mark.skipif(lab_unavailable() is not None, reason=str(lab_unavailable()))
def test_in_the_laboratory_a_long_line_is_no_narrow_one() -> None:
    """50 ms one way: the latency is that, a hop over gloo takes it twice, and the 50 Mbit/s are found."""
    for found in found_in(LabTopology(2, rate_bytes_per_s=50 * MBIT, delay_s=0.05)):
        assert found.levels["all"].latency_s == pytest.approx(0.05, rel=0.2)
        assert found.levels["all"].hop_s == pytest.approx(0.1, rel=0.2)
        assert found.levels["all"].bytes_per_s == pytest.approx(50 * MBIT, rel=0.35)
