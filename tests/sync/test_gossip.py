"""Gossip: the mean stays, what differs contracts as its graph says, and a code that loses much keeps the mean."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from contracts.test_sync import SETTINGS
from gossamer.comm.bucket import Bucket, Layout
from gossamer.comm.channel.counting import CountingChannel
from gossamer.comm.channel.local import LocalChannel, run_lockstep
from gossamer.comm.message import ExchangeContext, ProcessGroups
from gossamer.exchange import codec
from gossamer.sync import topology
from gossamer.sync._gossip_exchange import GossipExchange
from pool import Pool

RANKS = [1, 2, 3, 5, 8]
UNEQUAL = [3.0, 1.0, 2.0, 0.5, 0.0, 1.0, 4.0, 1.5]


def matrix(name: str, weights: list[float], round: int) -> Tensor:
    one, found = topology.build(name), torch.zeros(len(weights), len(weights), dtype=torch.float64)
    for i in range(len(weights)):
        row = one.row(i, weights, (0, round))
        assert list(row) == sorted(row) and set(row) <= {i, *one.near(i, len(weights), (0, round))}
        for j, part in row.items():
            found[i, j] = part
    return found


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", topology.names())
def test_a_row_sums_to_one_and_the_weighted_mean_stays(name: str, ranks: int) -> None:
    for round in range(4):
        for given in ([1.0] * ranks, UNEQUAL[:ranks]):
            mixing, weights = matrix(name, given, round), torch.tensor(given, dtype=torch.float64)
            assert bool((mixing >= 0).all())
            torch.testing.assert_close(mixing.sum(1), torch.ones(ranks, dtype=torch.float64))
            flow = weights[:, None] * mixing
            torch.testing.assert_close(flow, flow.T)
        near = [topology.build(name).near(i, ranks, (0, round)) for i in range(ranks)]
        assert all((i in near[j]) == (j in near[i]) for i in range(ranks) for j in range(ranks))


def world(one: GossipExchange, inputs: Tensor, rounds: int, weights: list[float] | None = None) -> list[Tensor]:
    """Where all are after every round of gossip alone, (ranks, numel); the bytes are checked on the way."""
    ranks, numel = inputs.shape
    layout = Layout.of({"x": torch.empty(numel)})
    share = torch.tensor(weights or [1.0] * ranks, dtype=torch.float64)
    states, now, found = [one.init(layout)] * ranks, inputs, []
    for round in range(rounds):
        channels = LocalChannel.world(ranks)
        at = [ExchangeContext(r, ProcessGroups.flat(ranks), share / share.sum(), (0, round), 1.0) for r in range(ranks)]
        methods = [one.run(Bucket(layout, now[r].clone()), states[r], at[r]) for r in range(ranks)]
        outcomes = run_lockstep(channels, methods)
        assert all(not bool(o.mean.any()) for o in outcomes)
        states, now = [o.state for o in outcomes], torch.stack([o.lost for o in outcomes if o.lost is not None])
        for rank, channel in enumerate(channels):
            price = CountingChannel(rank, ProcessGroups.flat(ranks))
            price.charge(one.traffic(layout, price.levels, rank))
            if one.graph.fixed_degree:
                assert channel.meter.snapshot() == price.meter.snapshot()
            elif ranks % 2 == 0:
                assert channel.meter.total_bytes == price.meter.total_bytes
            else:
                assert channel.meter.total_bytes <= price.meter.total_bytes
        found.append(now)
    return found


def spread(at: Tensor) -> float:
    """Consensus distance: the squared distance of all from their mean."""
    return float((at.double() - at.double().mean(0)).square().sum())


def drawn(ranks: int, numel: int = 500) -> Tensor:
    return torch.randn(ranks, numel, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", topology.names())
@pytest.mark.parametrize("coding", ["float32", "int8"])
def test_the_mean_of_all_stays(name: str, ranks: int, coding: str) -> None:
    one, inputs = GossipExchange(topology.build(name), codec.build(coding)), drawn(ranks)
    torch.testing.assert_close(world(one, inputs, 6)[-1].mean(0), inputs.mean(0), rtol=0, atol=1e-6)
    shares = torch.tensor(UNEQUAL[:ranks])
    after = world(one, inputs, 6, UNEQUAL[:ranks])[-1]
    torch.testing.assert_close(shares @ after / shares.sum(), shares @ inputs / shares.sum(), rtol=0, atol=1e-6)


def test_a_ring_contracts_by_the_square_of_its_second_eigenvalue() -> None:
    """From where that is slowest: a wave around the ring."""
    ranks = 8
    inputs = torch.cos(2 * math.pi * torch.arange(ranks) / ranks)[:, None] * drawn(1)
    after = world(GossipExchange(topology.build("ring"), codec.build("float32")), inputs, 3)
    second = 1 / 3 + 2 / 3 * math.cos(2 * math.pi / ranks)
    for before, now in zip([inputs, *after], after, strict=False):
        assert spread(now) == pytest.approx(second**2 * spread(before), rel=1e-4)


def test_pairs_contract_as_expected_over_their_matchings() -> None:
    """A matching is a projection, so that E |W x|^2 is x E(W) x: here over 400 of them, from one place."""
    ranks, inputs = 8, drawn(8, 50)
    second = (ranks - 2) / (2 * (ranks - 1))
    falls = [spread(matrix("pairs", [1.0] * ranks, r).float() @ inputs) / spread(inputs) for r in range(400)]
    assert sum(falls) / 400 == pytest.approx(second, rel=0.03)
    after = world(GossipExchange(topology.build("pairs"), codec.build("float32")), inputs, 3)
    wanted = inputs
    for round in range(3):
        wanted = matrix("pairs", [1.0] * ranks, round).float() @ wanted
    torch.testing.assert_close(after[-1], wanted, rtol=0, atol=1e-6)


def test_complete_is_the_mean_on_all_bit_for_bit() -> None:
    inputs = drawn(5)
    (after,) = world(GossipExchange(topology.build("complete"), codec.build("float32")), inputs, 1)
    assert all(torch.equal(row, after[0]) for row in after)
    torch.testing.assert_close(after[0], inputs.mean(0), rtol=0, atol=1e-6)


def test_what_is_remembered_of_neighbors_that_stay_lets_four_bits_come_together() -> None:
    """CHOCO: differences to what is known go to zero, and their error with them; without a memory the error stays."""
    inputs = drawn(6)
    exact = spread(world(GossipExchange(topology.build("ring"), codec.build("float32")), inputs, 60)[-1])
    coded = spread(world(GossipExchange(topology.build("ring"), codec.build("int4"), 0.8), inputs, 60)[-1])
    forgetful = spread(world(GossipExchange(topology.build("pairs"), codec.build("int4"), 0.8), inputs, 60)[-1])
    assert exact < 1e-6 * spread(inputs)
    assert coded < 1e-6 * spread(inputs) < forgetful


ALL = [{"topology": g, "codec": c} for g in topology.names() for c in ("float32", "int8")]


@pytest.mark.parametrize("islands", [[[0], [1], [2]], [[0, 1], [2]]])
@pytest.mark.parametrize("given", ALL)
def test_after_a_full_average_all_are_one_and_in_between_they_are_not(
    pool: Pool, given: dict[str, Any], islands: list[list[int]]
) -> None:
    written = {"gossip": {"sync_every": 1, "global_sync_every": 3, **given}}
    found = pool.run("sync.apart_jobs:rounds", 3, written=written, steps=7, islands=islands, finish=False)
    for step in range(7):
        agree = all(one["at"][step] == found[0]["at"][step] for one in found)
        is_full = (step + 1) % 3 == 0
        may = (given["codec"] == "float32" and given["topology"] != "pairs") or len(islands) == 2
        assert agree if is_full else may or not agree


def test_gossip_s_mean_follows_the_steps_alone(pool: Pool) -> None:
    """Of a linear problem (quadratics), where the mean of the islands' steps is the step of their mean."""
    apart = pool.run("sync.apart_jobs:rounds", 3, written={"local_sgd": {"sync_every": 50}}, steps=5, finish=False)
    found = pool.run("sync.apart_jobs:rounds", 3, written=SETTINGS["gossip"], steps=5, finish=False)
    for step in range(5):
        mean, wanted = (torch.tensor([one["at"][step] for one in ranks]).mean(0) for ranks in (found, apart))
        torch.testing.assert_close(mean, wanted, rtol=0, atol=1e-6)
