"""States on islands, in lockstep: rows are dealt out once, means land on their owners, bytes by level are as derived,
and what each rank has updated reaches all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from exchange import crew
from exchange.test_structure import kept_mean, levels_of
from exchange.test_structure import world as exchanged
from gossamer import exchange as exchange_methods
from gossamer import optimizer as optimizer_methods
from gossamer import sharding as sharding_methods
from gossamer.comm.bucket import Bucket, Layout
from gossamer.comm.channel.counting import CountingChannel
from gossamer.comm.channel.local import LocalChannel, run_lockstep
from gossamer.comm.message import Collective, ProcessGroups
from gossamer.exchange import Exchange
from gossamer.exchange.codec.float32 import Float32
from gossamer.exchange.error_feedback import ErrorFeedback
from gossamer.sharding._hierarchical_reduce_scatter import HierarchicalReduceScatter, dealt
from gossamer.sharding._reduce_scatter import ReduceScatter, parts_of
from gossamer.sharding._row_partition import RowPartition, path_of
from gossamer.spec.errors import BadInput

ISLANDS = {"2+2": (2, 2), "3+3": (3, 3), "2x3": (2, 2, 2), "2+1": (2, 1), "3+2": (3, 2), "1+3+2": (1, 3, 2), "4": (4,)}
each_islands = pytest.mark.parametrize("islands", ISLANDS.values(), ids=ISLANDS)
each_level = pytest.mark.parametrize("level", ["all", "island"])
EVEN = {"w": (24, 32), "v": (48, 8), "bias": (96,)}
CODED: Any = {"weights": "int8", "gradients": "int4", "intra_gradients": "int8"}


def deal_of(islands: Sequence[int], level: str) -> RowPartition:
    levels = levels_of(islands)
    return RowPartition(levels, path_of(level, levels))


def at_level(where: Layout, deal: RowPartition, rank: int, flat: torch.Tensor) -> torch.Tensor:
    """`flat`, but for zeros where the rows are not this rank's."""
    found = torch.zeros_like(flat)
    for start, numel in deal.part(where, rank):
        found[start : start + numel] = flat[start : start + numel]
    return found


@each_islands
@each_level
@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (5,), (17, 2), (64, 4), (0, 3)])
def test_rows_are_dealt_out_once(islands: tuple[int, ...], level: str, shape: tuple[int, ...]) -> None:
    """Over the givers of any rank; on every island, where each has all of them; none to those without a counterpart."""
    deal = deal_of(islands, level)
    for rank in deal.levels.everyone:
        found = [deal.rows("name", shape, giver) for giver in deal.givers(rank)]
        rows = sorted(i for one in found for i in range(one.start, one.start + one.count))
        assert rows == list(range(shape[0] if shape else 1))
    counts = [deal.rows("name", shape, rank).count for rank in deal.levels.everyone]
    owners = {rank for g in deal.levels.groups["island"] for rank in g[: min(islands)]}
    assert all(n == 0 or rank in owners for rank, n in enumerate(counts))
    firsts = [n for rank, n in enumerate(counts) if deal.is_first(rank)]
    assert sum(firsts) == (shape[0] if shape else 1)


@pytest.mark.parametrize("owners", [1, 2, 3, 5])
@pytest.mark.parametrize("shapes", [crew.SHAPES, EVEN, {"s": ()}, {"e": (0,)}], ids=["mixed", "even", "one", "none"])
def test_the_order_of_a_message_is_a_permutation(owners: int, shapes: Mapping[str, tuple[int, ...]]) -> None:
    where = crew.layout(shapes)
    parts, runs = parts_of(where, owners), dealt(where, owners)
    places = [i for part in parts for start, numel in part for i in range(start, start + numel)]
    assert sorted(places) == list(range(where.numel))
    assert [run.numel for run in runs] == [sum(numel for _, numel in part) for part in parts]
    assert [run.layout.numel for run in runs] == [run.numel for run in runs]
    assert all(a.stop == b.start for a, b in pairwise(runs)) and runs[-1].stop == where.numel
    for run in runs:
        assert all(a.start + a.numel == b.start for a, b in pairwise(run.layout.entries))


@each_islands
@pytest.mark.parametrize(
    "between", [ReduceScatter(), exchange_methods.build("dense"), exchange_methods.build({"two_shot": "float32"})]
)
def test_the_mean_of_its_rows_lands_on_their_owner(islands: tuple[int, ...], between: Exchange) -> None:
    """Of everybody's, by weight; a scatter between islands deals out what is a rank's on its island."""
    where, levels = crew.layout(), levels_of(islands)
    deal = RowPartition(levels, ("island", "between") if isinstance(between, ReduceScatter) else ("island",))
    outcomes, channels = exchanged(HierarchicalReduceScatter(between), levels, where)
    plain, _ = exchanged(exchange_methods.build("dense"), levels, where)
    for rank, outcome in enumerate(outcomes):
        wanted = at_level(where, deal, rank, plain[0].mean)
        torch.testing.assert_close(outcome.mean, wanted, rtol=1e-6, atol=1e-6)
        assert outcome.lost is None
        priced = CountingChannel(rank, levels)
        priced.charge(HierarchicalReduceScatter(between).traffic(where, levels, rank))
        assert channels[rank].meter.snapshot() == priced.meter.snapshot()
        assert channels[rank].meter.messages == priced.meter.messages


@each_islands
@pytest.mark.parametrize("inside", [None, "int8"])
def test_what_is_lost_is_accounted_for(islands: tuple[int, ...], inside: Any) -> None:
    """mean = sum_i w_i (x_i - lost_i), of the rows of every owner; so that feedback around it brings it all in time."""
    where, levels = crew.layout(), levels_of(islands)
    one = HierarchicalReduceScatter(
        ReduceScatter(exchange_methods.codec.build("int4")), exchange_methods.codec.build(inside) if inside else None
    )
    outcomes, _ = exchanged(one, levels, where)
    kept = kept_mean(where, outcomes)
    for rank, outcome in enumerate(outcomes):
        wanted = at_level(where, RowPartition(levels, ("island", "between")), rank, kept)
        torch.testing.assert_close(outcome.mean.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weights", [(3, 0, 1, 2), (0, 5, 1, 2), (0, 0, 2, 1), (0, 0, 1, 0)], ids=str)
@pytest.mark.parametrize(
    "between", [ReduceScatter(exchange_methods.codec.build("int4")), exchange_methods.build({"two_shot": "sign"})]
)
@pytest.mark.parametrize("inside", [None, "int8"])
def test_that_holds_where_ranks_or_islands_have_no_weight(inside: Any, between: Exchange, weights: Any) -> None:
    """Whose input does not count owes what it has lost of the others'."""
    where, levels = crew.layout(), levels_of((2, 2))
    one = HierarchicalReduceScatter(between, exchange_methods.codec.build(inside) if inside else None)
    shares = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    outcomes, _ = exchanged(one, levels, where, weights=shares)
    wanted = torch.zeros(where.numel, dtype=torch.float64)
    for rank, outcome in enumerate(outcomes):
        wanted += shares[rank] * crew.kept(crew.bucket(where, rank).flat.double(), outcome)
        wanted -= 0.0 if outcome.owed is None else outcome.owed.double()
    deal = RowPartition(levels, ("island", "between") if isinstance(between, ReduceScatter) else ("island",))
    for rank, outcome in enumerate(outcomes):
        at_mine = at_level(where, deal, rank, wanted)
        torch.testing.assert_close(outcome.mean.double(), at_mine, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weights", [(3, 1, 1, 2), (3, 0, 1, 2), (0, 0, 2, 1)], ids=str)
@pytest.mark.parametrize(
    "between", [ReduceScatter(exchange_methods.codec.build("int4")), exchange_methods.build({"two_shot": "int4"})]
)
@pytest.mark.parametrize("hops", [True, False])
def test_what_a_narrow_type_rounds_off_is_owed_whole(hops: bool, between: Exchange, weights: Any) -> None:
    """Whoever alone has the mean of a row bears all that is rounded off it, with weight or without."""
    if not hops and not isinstance(between, ReduceScatter):
        pytest.skip("has the whole mean everywhere")
    where, levels = crew.layout({"w": (24, 16), "b": (40,)}, dtype=torch.bfloat16), levels_of((2, 2))
    one = ErrorFeedback(HierarchicalReduceScatter(between) if hops else between)
    shares = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    path = ("island", "between") if isinstance(between, ReduceScatter) else ("island",)
    deal = RowPartition(levels, path if hops else ("all",))
    states, sent = [one.init(where)] * 4, torch.zeros(where.numel, dtype=torch.float64)
    given, size = sent.clone(), 0.0
    for step in range(6):
        outcomes, _ = exchanged(one, levels, where, states, step, weights=shares)
        states = [o.state for o in outcomes]
        mean = sum(w * crew.bucket(where, r, step).flat.double() for r, w in enumerate(shares))
        firsts = [at_level(where, deal, r, o.mean.double()) for r, o in enumerate(outcomes) if deal.is_first(r)]
        given, sent, size = given + 0.1 * mean, sent + 0.1 * sum(firsts), size + 0.1 * float(mean.norm())
    owed = sum(s.tensors["e"].double() for s in states)
    assert float((sent + owed - given).norm()) < 1e-5 * size


@each_level
@pytest.mark.parametrize("islands", [(2, 2), (3, 2)])
def test_feedback_between_islands_pays_in_the_end(islands: tuple[int, ...], level: str) -> None:
    """The residual stays with the rows of its owner: with dense at the last step all that was owed has come."""
    where, deal = crew.layout(), deal_of(islands, level)
    sharding, ranks = sharding_methods.build({"zero1": {"shard_group": level}}), sum(islands)
    written = {"hierarchical": {"inter": {"error_feedback": {"two_shot": "int4"}}}}
    one = sharding.exchange(exchange_methods.build(written), deal.path)
    last = sharding.exchange(
        exchange_methods.build({"hierarchical": {"inter": {"error_feedback": "dense"}}}), deal.path
    )
    assert isinstance(one, HierarchicalReduceScatter) and isinstance(last, HierarchicalReduceScatter)
    states, total, wanted = [one.init(where)] * ranks, [torch.zeros(where.numel)] * ranks, torch.zeros(where.numel)
    for step in range(5):
        outcomes, _ = exchanged(one if step < 4 else last, deal.levels, where, states, step)
        states = [o.state for o in outcomes]
        total = [t + o.mean for t, o in zip(total, outcomes, strict=True)]
        wanted += exchanged(exchange_methods.build("dense"), deal.levels, where, step=step)[0][0].mean
    for rank in range(ranks):
        torch.testing.assert_close(total[rank], at_level(where, deal, rank, wanted), rtol=1e-5, atol=1e-5)


@each_islands
@pytest.mark.parametrize("inside", [None, "int8"])
def test_islands_that_are_apart_have_means_of_their_own(islands: tuple[int, ...], inside: Any) -> None:
    """On the owners of where they meet, so that states lie still when islands part; of what is lost each has its own
    part, and the state of what goes between islands is left as it is.
    """
    where, levels, ranks = crew.layout(), levels_of(islands), sum(islands)
    deal, apart = RowPartition(levels, ("island",)), levels.only("island")
    one = HierarchicalReduceScatter(
        exchange_methods.build({"error_feedback": {"two_shot": "int4"}}),
        exchange_methods.codec.build(inside) if inside else None,
    )
    one.check(where, apart)
    states, weights = [one.init(where) for _ in range(ranks)], crew.weights(ranks)
    for group in levels.groups["island"]:
        weights[list(group)] /= weights[list(group)].sum()
    rounds = [replace(crew.at(rank, ranks, levels=apart), weights=weights) for rank in range(ranks)]
    channels = LocalChannel.world(ranks, apart)
    given = [crew.bucket(where, rank) for rank in range(ranks)]
    outcomes = run_lockstep(channels, [one.run(given[r], states[r], rounds[r]) for r in range(ranks)])
    for rank, outcome in enumerate(outcomes):
        fellows = levels.group("island", rank)
        kept = [crew.kept(crew.bucket(where, r).flat.double(), outcomes[r]) for r in fellows]
        mean = torch.stack([weights[r] * k for r, k in zip(fellows, kept, strict=True)]).sum(0)
        wanted = at_level(where, deal, rank, mean)
        torch.testing.assert_close(outcome.mean.double(), wanted, rtol=1e-5, atol=1e-5)
        assert outcome.state is states[rank]
        priced = CountingChannel(rank, apart)
        priced.charge(one.traffic(where, apart, rank))
        assert channels[rank].meter.snapshot() == priced.meter.snapshot()


def gathered(islands: Sequence[int], written: Any) -> tuple[list[dict[str, torch.Tensor]], Layout]:
    """One update of SGD by hand and the gather after it, on all ranks."""
    sharding, levels = sharding_methods.build(written), levels_of(islands)
    deal = sharding.deal(levels)
    where, ranks = crew.layout(), sum(islands)
    held, methods = [], []
    for rank in range(ranks):
        params = {n: v.clone() for n, v in Bucket(where, crew.bucket(where, 99).flat).slices()}
        mine = sharding_methods.holdings(deal, sharding_methods.shapes_of(params), rank)
        states = sharding_methods.ShardedOptimizer.of(
            optimizer_methods.build({"sgd": {"lr": 1.0}}),
            params,
            deal,
            rank=rank,
            holdings=mine,
            differences=sharding.differences,
        )
        gradients = crew.bucket(where, 7).slices()
        states.update({n: states.own(n, g) for n, g in gradients}, lr_scale=1.0, step=0)
        if sharding.differences is None:
            methods.append(states._gathered(where))
        else:
            methods.append(states._moved(sharding.differences, (0, 0), where))
        held.append(params)
    channels = LocalChannel.world(ranks, levels)
    run_lockstep(channels, methods)
    for rank, channel in enumerate(channels):
        priced = CountingChannel(rank, levels)
        priced.charge(sharding_methods.gather_traffic(where, deal, rank, sharding.differences))
        assert channel.meter.snapshot() == priced.meter.snapshot()
    return held, where


@each_islands
@pytest.mark.parametrize(
    "written", [{"zero1": {"shard_group": one}} for one in ("all", "island")], ids=["all", "island"]
)
def test_what_is_updated_reaches_all(islands: tuple[int, ...], written: Any) -> None:
    held, where = gathered(islands, written)
    before, gradient = dict(crew.bucket(where, 99).slices()), dict(crew.bucket(where, 7).slices())
    for params in held:
        assert all(torch.equal(params[n], before[n] - gradient[n]) for n in params)


@each_islands
@each_level
def test_coded_differences_are_the_same_everywhere(islands: tuple[int, ...], level: str) -> None:
    """Also where several islands code the same rows, rounding at random."""
    held, where = gathered(islands, {"sdp4bit": {"shard_group": level}})
    before, gradient = dict(crew.bucket(where, 99).slices()), dict(crew.bucket(where, 7).slices())
    for params in held:
        assert all(torch.equal(params[n], held[0][n]) for n in params)
    moved = torch.cat([(held[0][n] - before[n] + gradient[n]).flatten() for n in before])
    assert 0 < moved.abs().max() <= 1.01 * max(float(g.abs().max()) for g in gradient.values() if g.numel()) / 7


def by_level(channels: Sequence[LocalChannel], levels: ProcessGroups) -> tuple[int, int]:
    """Bytes that rank 0 sent inside its island, and out of it."""
    mine = {f"0>{peer}" for peer in levels.group("island", 0)}
    sent = channels[0].meter.snapshot()
    return sum(n for link, n in sent.items() if link in mine), sum(n for link, n in sent.items() if link not in mine)


@pytest.mark.parametrize(("islands", "k", "m"), [((2, 2), 2, 2), ((3, 3), 3, 2), ((2, 2, 2), 2, 3)])
@pytest.mark.parametrize("coded", [False, True], ids=["plain", "coded"])
@each_level
def test_bytes_by_level(islands: tuple[int, ...], k: int, m: int, level: str, coded: bool) -> None:
    """Of d numbers on m islands of k ranks; b bytes for each, as they are or in four and eight bits."""
    sharding = sharding_methods.build(
        {"sdp4bit": CODED | {"shard_group": level}} if coded else {"zero1": {"shard_group": level}}
    )
    levels, where = levels_of(islands), crew.layout({"w": (48 * k * m, 256)})
    deal, d = RowPartition(levels, sharding.path(levels)), where.numel
    one = sharding.exchange(exchange_methods.build("dense"), deal.path)
    _, channels = exchanged(one, levels, where)
    rows = CountingChannel(0, levels)
    rows.charge(sharding_methods.gather_traffic(where, deal, 0, sharding.differences))
    there, back = by_level(channels, levels), by_level([rows], levels)  # type: ignore[list-item]
    inside, between, updates = (1 + 4 / 256, 0.5 + 4 / 128, 1 + 4 / 256) if coded else (4, 4, 4)
    assert there[0] == (k - 1) / k * d * inside
    assert back[0] == (k - 1) / k * d * updates
    if level == "all":
        assert there[1] == (m - 1) / m * d / k * between
        assert back[1] == (m - 1) / m * d / k * updates
    else:
        assert there[1] == pytest.approx(2 * (m - 1) / m * d / k * between, rel=1e-3)  # gloo's ring has its chunks
        assert back[1] == 0


def test_an_exchange_whose_state_is_no_number_of_the_bucket_stays_what_it_is() -> None:
    """Low rank factors are of whole matrices: then the whole mean goes everywhere, as under any other exchange."""
    sharding = sharding_methods.build("zero1")
    for written in ({"hierarchical": {"inter": {"powersgd": {"rank": 2}}}}, {"topk": {"fraction": 0.1}}):
        given = exchange_methods.build(written)
        assert sharding.exchange(given, ("island", "between")) is given
    flat = {"error_feedback": {"two_shot": "int8"}}
    assert sharding.exchange(exchange_methods.build(flat), ("all",)).inner == ReduceScatter(
        exchange_methods.codec.build("int8")
    )  # type: ignore[attr-defined]


def test_flat_links_have_one_hop() -> None:
    for levels in (ProcessGroups.flat(3), levels_of((1, 1, 1)), levels_of((3,))):
        assert (
            sharding_methods.build("zero1").path(levels) == sharding_methods.build("sdp4bit").path(levels) == ("all",)
        )
        assert sharding_methods.build("none").path(levels) == ()
    with pytest.raises(BadInput, match=r"plan\.sharding: wanted islands of ranks"):
        sharding_methods.build({"zero1": {"shard_group": "island"}}).check(ProcessGroups.flat(3))
    with pytest.raises(BadInput, match="shard_group"):
        sharding_methods.build({"zero1": {"shard_group": "planet"}}, key="plan.sharding")


def test_gradients_by_rows_go_as_states_do_and_parameters_flat() -> None:
    levels = levels_of((2, 2))
    assert (
        sharding_methods.build("zero2").path(levels)
        == sharding_methods.build("zero1").path(levels)
        == ("island", "between")
    )
    assert sharding_methods.build("zero3").path(levels) == ("all",)
    assert sharding_methods.build({"zero2": {"shard_group": "island"}}).path(levels) == ("island",)
    dense = exchange_methods.build("dense")
    assert sharding_methods.build("zero2").exchange(dense, ("island", "between")) == HierarchicalReduceScatter(
        ReduceScatter()
    )
    assert sharding_methods.build({"zero2": {"shard_group": "island"}}).exchange(
        dense, ("island",)
    ) == HierarchicalReduceScatter(dense)
    assert sharding_methods.build("zero3").exchange(dense, ("all",)) == ReduceScatter()


def test_half_precision_buckets_are_served() -> None:
    where, levels = crew.layout(dtype=torch.bfloat16), levels_of((2, 2))
    outcomes, channels = exchanged(HierarchicalReduceScatter(ReduceScatter()), levels, where)
    assert outcomes[0].mean.dtype == torch.bfloat16
    assert any(
        t.itemsize == 2 and t.combine is Collective.SHUFFLE
        for t in HierarchicalReduceScatter(ReduceScatter()).traffic(where, levels, 0)
    )
    assert channels[0].meter.total_bytes == 2 * (where.numel - _own(where, levels)) + _between(where, levels)


def _own(where: Layout, levels: ProcessGroups) -> int:
    return sum(numel for _, numel in RowPartition(levels, ("island",)).part(where, 0))


def _between(where: Layout, levels: ProcessGroups) -> int:
    priced = CountingChannel(0, levels)
    priced.charge(HierarchicalReduceScatter(ReduceScatter()).traffic(where, levels, 0)[1:])
    return priced.meter.total_bytes


@pytest.mark.parametrize("one", [ReduceScatter(), HierarchicalReduceScatter(exchange_methods.build("dense"))], ids=repr)
def test_double_precision_stays_where_rows_are_dealt_out(one: Exchange) -> None:
    """Of the numbers themselves; codecs that lose nothing of float32 would round them, and are refused."""
    where, levels = crew.layout(EVEN, dtype=torch.float64), crew.levels_of(4)
    one.check(where, levels)
    given = [crew.bucket(where, rank) for rank in range(4)]
    for rank, x in enumerate(given):
        x.flat.copy_(torch.randn(where.numel, generator=torch.Generator().manual_seed(rank), dtype=torch.float64))
    exact = sum(share * x.flat for share, x in zip(crew.weights(4), given, strict=True))
    outcomes, _ = crew.world(one, 4, given, [one.init(where)] * 4)
    islands = 1 if isinstance(one, ReduceScatter) else 2  # each of which has all rows
    found = torch.stack([outcome.mean for outcome in outcomes]).sum(0) / islands
    torch.testing.assert_close(found, exact, rtol=1e-13, atol=1e-15)
    coded = {"codec": Float32()} if isinstance(one, ReduceScatter) else {"inside": Float32()}
    with pytest.raises(BadInput, match="wanted numbers of at most 32 bits"):
        replace(one, **coded).check(where, levels)  # type: ignore[arg-type]
