"""Parameters by rows of an island, states by rows of these, in lockstep: who has what, what comes back when, bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from exchange import crew
from exchange.test_structure import levels_of
from exchange.test_structure import world as exchanged
from gossamer import exchange as exchange_methods
from gossamer import optimizer as optimizer_methods
from gossamer import sharding as sharding_methods
from gossamer.comm.bucket import Bucket, Layout
from gossamer.comm.channel.counting import CountingChannel
from gossamer.comm.channel.local import LocalChannel, run_lockstep
from gossamer.comm.message import ProcessGroups
from gossamer.optimizer.adamw import AdamW
from gossamer.plan import state_bytes
from gossamer.sharding import ShardedOptimizer, ShardedParameters, UnshardOrder
from gossamer.sharding._hierarchical_reduce_scatter import HierarchicalReduceScatter
from gossamer.sharding._reduce_scatter import ReduceScatter
from gossamer.spec.errors import BadInput
from sharding.test_hops import EVEN, by_level, each_islands

WAYS: dict[str, Any] = {
    "all": "zero3",
    "weights": {"zero3": {"weights_group": "island"}},
    "states": {"zero3": {"weights_group": "island", "states_group": "island"}},
}
each_way = pytest.mark.parametrize("written", WAYS.values(), ids=WAYS)
on_islands = pytest.mark.parametrize("written", [WAYS["weights"], WAYS["states"]], ids=["weights", "states"])


class Named(nn.Module):
    """The parameters of a layout, which no unit holds: all of them are gathered at once."""

    def __init__(self, where: Layout) -> None:
        super().__init__()
        for name, view in crew.bucket(where, 99).slices():
            self.register_parameter(name, nn.Parameter(view.clone()))


def world_of(islands: Sequence[int], written: Any, where: Layout) -> tuple[list[ShardedOptimizer], ProcessGroups]:
    """Every rank's, with SGD of rate 1 and with momentum, so that there is as much state as there are parameters."""
    sharding, levels = sharding_methods.build(written), levels_of(islands)
    deal, rule = sharding.deal(levels), optimizer_methods.build({"sgd": {"lr": 1.0, "momentum": 0.5}})
    found = []
    for rank in levels.everyone:
        module = Named(where)
        shards = ShardedParameters.of(module, UnshardOrder.of(module, ()), None, deal=deal.of_parameters, rank=rank)  # type: ignore[arg-type]
        params = dict(module.named_parameters())
        mine = sharding_methods.holdings(deal, sharding_methods.shapes_of(params), rank)
        found.append(
            ShardedOptimizer.of(
                rule, params, deal, rank=rank, holdings=mine, differences=sharding.differences, shards=shards
            )
        )
    return found, levels.and_more(ProcessGroups({sharding_methods.LEVEL: levels.groups[deal.path[0]]}))


@each_islands
@each_way
def test_rows_lie_where_they_were_dealt_to(islands: tuple[int, ...], written: Any) -> None:
    """Each island has all parameters once, or all ranks have; the states of each are rows of those that it has; what
    is not spare is everything once.
    """
    where = crew.layout()
    world, levels = world_of(islands, written, where)
    homes = levels.groups["all" if written == "zero3" else "island"]
    for home in homes:
        assert sum(t.numel() for rank in home for _, t in world[rank].shards.own()) == where.numel
    for states in world:
        held = {n: t.untyped_storage().data_ptr() for n, t in states.shards.own()}
        assert all(t.untyped_storage().data_ptr() == held[n] for n, t in states.parameters())
    assert sum(t.numel() for s in world if not s.is_spare for *_, t in s.slots()) == where.numel
    assert sum(t.numel() for s in world if not s.has_spare_parameters for _, t in s.shards.own()) == where.numel


@each_islands
@each_way
def test_what_is_updated_is_what_is_gathered(islands: tuple[int, ...], written: Any) -> None:
    """An update by hand; what comes back after it; then the parameters as a unit has them. Bytes of both as priced."""
    where = crew.layout()
    world, levels = world_of(islands, written, where)
    before, gradient = dict(crew.bucket(where, 99).slices()), dict(crew.bucket(where, 7).slices())
    for states in world:
        mine = {n: states.own(n, g) for n, g in gradient.items()}
        states.update({n: g.clone() for n, g in mine.items()}, lr_scale=1.0, step=0)
    after = LocalChannel.world(len(world), levels)
    if world[0].deal.back:
        run_lockstep(after, [states._gathered(where) for states in world])
    for states in world:
        for name, rows in states.shards.rows.items():
            if rows.count:
                wanted = rows.of(before[name] - gradient[name])
                assert torch.equal(dict(states.shards.own())[name], wanted)
    unit = LocalChannel.world(len(world), levels)
    buffers = [states.shards.always.buffers[0] for states in world]
    for outcome in run_lockstep(unit, [buffer.gather() for buffer in buffers]):
        held = dict(Bucket(buffers[0].whole.layout, outcome.mean).slices())
        assert all(torch.equal(held[n], before[n] - gradient[n]) for n in before)
    for rank, states in enumerate(world):
        walk = UnshardOrder.of(states.shards.module, ())
        for channel, traffic in (
            (after[rank], sharding_methods.gather_traffic(where, states.deal, rank, None)),
            (unit[rank], walk.traffic(states.deal.of_parameters, rank, 1)),
        ):
            priced = CountingChannel(rank, levels)
            priced.charge(traffic)
            assert channel.meter.snapshot() == priced.meter.snapshot()


@pytest.mark.parametrize(("islands", "k", "m"), [((2, 2), 2, 2), ((3, 3), 3, 2), ((2, 2, 2), 2, 3)])
@on_islands
def test_bytes_by_level(islands: tuple[int, ...], k: int, m: int, written: Any) -> None:
    """Of d numbers on m islands of k ranks, of rank 0: gradients, what comes back after an update, and a unit."""
    sharding, levels = sharding_methods.build(written), levels_of(islands)
    where = crew.layout({"w": (48 * k * m, 256)})
    deal, d = sharding.deal(levels), where.numel
    _, channels = exchanged(sharding.exchange(exchange_methods.build("dense"), deal.path), levels, where)
    back, unit = CountingChannel(0, levels), CountingChannel(0, levels)
    back.charge(sharding_methods.gather_traffic(where, deal, 0, None))
    unit.charge(UnshardOrder.of(Named(where), ()).traffic(deal.of_parameters, 0, 1))
    gradients, rows, parameters = (by_level(one, levels) for one in (channels, [back], [unit]))  # type: ignore[arg-type]
    crossing = 4 * (m - 1) / m * d / k
    if written == WAYS["weights"]:
        assert gradients == (4 * (k - 1) / k * d, crossing)
        assert rows == (0, crossing)
    else:
        assert gradients == (4 * (k - 1) / k * d, pytest.approx(2 * crossing, rel=1e-3))  # gloo's ring has its chunks
        assert rows == (0, 0)
    assert parameters == (4 * (k - 1) / k * d, 0)


@pytest.mark.parametrize(("islands", "k", "m"), [((2, 2), 2, 2), ((3, 3), 3, 2), ((2, 2, 2), 2, 3), ((3, 2), 2, 2)])
def test_model_state_is_what_the_formula_says(islands: tuple[int, ...], k: int, m: int) -> None:
    """Of AdamW in float32, even rows: 4/k + 12/(km) bytes, or 16/k; none where a rank has no counterpart."""
    where, levels = crew.layout({n: (6 * s[0], *s[1:]) for n, s in EVEN.items()}), levels_of(islands)
    walk, names = UnshardOrder.of(Named(where), ()), [e.name for e in where.entries]
    for way, each in (("weights", 4 / k + 12 / (k * m)), ("states", 16 / k)):
        held = state_bytes(sharding_methods.build(WAYS[way]), walk, names, levels, optimizer=AdamW())
        owners = {rank for island in levels.groups["island"] for rank in island[:k]}
        wanted = [each * where.numel if rank in owners else 0 for rank in levels.everyone]
        assert held == pytest.approx(wanted, rel=1e-12)


def test_where_islands_are() -> None:
    """Levels of the partition; flat where islands are not known yet; refused where they never come."""
    levels, dense = levels_of((2, 2)), exchange_methods.build("dense")
    weights, states = (sharding_methods.build(WAYS[one]) for one in ("weights", "states"))
    assert weights.path(levels) == ("island", "between") and states.path(levels) == ("island",)
    assert weights.deal(levels).back == ("between",) and states.deal(levels).back == ()
    assert weights.exchange(dense, weights.path(levels)) == HierarchicalReduceScatter(ReduceScatter())
    assert states.exchange(dense, states.path(levels)) == HierarchicalReduceScatter(dense)
    for one in (weights, states):
        assert one.path(ProcessGroups.flat(4)) == ("all",)
        assert one.deal(levels).of_parameters.path == ("island",)
        with pytest.raises(BadInput, match=r"plan\.sharding: wanted islands of ranks"):
            one.check(ProcessGroups.flat(4))
    with pytest.raises(BadInput, match=r"plan\.sharding\.zero3\.states_group: wanted weights_group: island"):
        sharding_methods.build({"zero3": {"states_group": "island"}}, key="plan.sharding")
    with pytest.raises(BadInput, match="weights_group"):
        sharding_methods.build({"zero3": {"weights_group": "planet"}}, key="plan.sharding")
