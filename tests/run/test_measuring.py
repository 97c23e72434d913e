"""What is measured for a choice, where ranks are unequal; and what is summed up while a run is adapted."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gossamer import exchange as exchange_methods
from gossamer import sharding as sharding_methods
from gossamer.autotune import exchange_profile, rehearsed_gradients
from gossamer.autotune.adaptive_compression import AdaptiveCompression
from gossamer.autotune.exchange_profile import EncodeTimes, ExchangeProfile
from gossamer.comm.bucket import Layout
from gossamer.comm.channel import Channel
from gossamer.comm.channel.local import LocalChannel
from gossamer.comm.channel.loopback import LoopbackChannel
from gossamer.comm.message import ProcessGroups
from gossamer.exchange import Exchange
from gossamer.plan.exchange import (
    CANDIDATES,
    Decision,
    MessagePrice,
    StepMeasurements,
    across_islands,
    choose,
    priced,
)
from gossamer.policy import AdaptChoices
from gossamer.recipe import ParameterRules
from gossamer.run.profile_step import StepProfile
from gossamer.spec.errors import BadInput
from gossamer.spec.method_config import told
from gossamer.spec.network import Link, Network
from gossamer.spec.plan import BUCKET_BYTES
from gossamer.spec.row_range import parts_in
from gossamer.spec.statistics import Statistics

LINKS = Network(islands=((0, 1, 2),), levels={"all": Link(latency_s=1e-3, bytes_per_s=1e7)})
INT8 = next(i for i, one in enumerate(CANDIDATES) if one.said.startswith("int8 two"))
SHAPES = {"a": (40, 30), "b": (30,), "c": (50, 20)}


@pytest.fixture
def by_rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Facts of three ranks, of which the second is slowest in everything, and has gradients that lose most."""
    slow = (1.0, 3.0, 2.0)
    monkeypatch.setattr(exchange_profile, "encode_slowdown", lambda: 0.25)
    monkeypatch.setattr(
        exchange_methods, "turn_seconds_of", lambda one, where, levels, rank, occupied: (0.01 * slow[rank],)
    )

    def facts(channel: Channel, sick: tuple[int, ...] = ()) -> StepMeasurements:
        rank, params = channel.rank, {n: torch.empty(shape) for n, shape in SHAPES.items()}
        rng = torch.Generator().manual_seed(rank)
        gradients = {n: torch.randn(p.shape, generator=rng) ** (1 + 2 * (rank == 1)) for n, p in params.items()}
        ready = {"a": 0.3 * slow[rank], "b": 0.2 * slow[rank], "c": 0.1 * slow[rank]}
        rehearsal = StepProfile(0.9 * slow[rank], 0.3 * slow[rank], ready, gradients)
        pump: Any = SimpleNamespace(channel=channel)
        measured = ExchangeProfile.by(rehearsal, params, CANDIDATES, pump, knows=not sick)
        (cut,) = measured.facts(LINKS, CANDIDATES, BUCKET_BYTES)[-1:]
        return cut

    return facts


def in_threads(run: Any, **given: Any) -> list[Any]:
    with ThreadPoolExecutor(3) as ranks:
        return list(ranks.map(lambda c: run(c, **given), LocalChannel.world(3, ProcessGroups.flat(3), patience_s=30.0)))


def test_the_slowest_rank_counts_and_a_bucket_is_ready_with_its_last_gradient(by_rank: Any) -> None:
    found = in_threads(by_rank)
    assert found[0] == found[1] == found[2]
    one = found[0]
    assert (one.compute_s, one.backward_s, one.stolen) == pytest.approx((2.7, 0.9, 0.25))
    (bucket,) = one.buckets
    assert bucket.ready_s == pytest.approx(0.9) and sorted(bucket.names) == ["a", "b", "c"]
    served = [o for o in bucket.options if o is not None]
    assert [o.cpu_s for o in served] == pytest.approx([0.03] * len(served))
    alone = {}
    for rank in range(3):
        channel = LoopbackChannel(rank, ProcessGroups({"all": ((rank,),)}))
        alone[rank] = by_rank(channel).buckets[0].options[INT8]
    assert bucket.options[INT8].loss == pytest.approx(max(o.loss for o in alone.values()))
    assert bucket.options[INT8].loss > 1.2 * min(o.loss for o in alone.values()), "ranks are too much alike"


def test_of_a_busy_rank_it_is_known_how_long_encoding_ran(by_rank: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoding runs for 0.1 s on every rank, which takes the second one 0.4 s: other processes have its processor."""
    clock = threading.local()

    def turn_seconds_of(one: object, where: object, levels: object, rank: int, part: float) -> tuple[float, ...]:
        clock.ran_s = getattr(clock, "ran_s", 0.0) + 0.1
        clock.now_s = getattr(clock, "now_s", 0.0) + (0.2, 0.4, 0.2)[rank]
        return (0.01,)

    monkeypatch.setattr(exchange_methods, "turn_seconds_of", turn_seconds_of)
    now = SimpleNamespace(
        perf_counter=lambda: getattr(clock, "now_s", 0.0), thread_time=lambda: getattr(clock, "ran_s", 0.0)
    )
    monkeypatch.setattr(exchange_profile, "time", now)
    assert [one.ran for one in in_threads(by_rank)] == pytest.approx([0.25] * 3)


def test_what_lossy_exchanges_cost_is_open_where_gradients_are_not_finite(by_rank: Any) -> None:
    one = in_threads(by_rank, sick=(1,))[0]
    served = [o is not None for o in one.buckets[0].options]
    assert served == [not c.lossy and c.most_occupied == 1.0 for c in CANDIDATES] and one.buckets[0].weight == 0.0


def test_a_number_that_is_none_is_told_by_its_rank(by_rank: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        exchange_methods,
        "turn_seconds_of",
        lambda one, where, levels, rank, occupied: (float("nan") if rank == 2 else 0.1,),
    )
    with pytest.raises(BadInput, match="finite cpu_s of all-reduce for 2230 numbers, got nan on rank 2"):
        in_threads(by_rank)


def test_a_gradient_as_large_as_float32_holds_has_a_loss(by_rank: Any) -> None:
    """Its square has none, in float32."""
    (channel,) = LocalChannel.world(1)
    rehearsal = StepProfile(0.9, 0.3, {"a": 0.3}, {"a": torch.full((40, 30), 1e30)})
    pump: Any = SimpleNamespace(channel=channel)
    exact_or_bf16 = [c for c in CANDIDATES if not c.lossy and c.most_occupied == 1.0]
    measured = ExchangeProfile.by(rehearsal, {"a": torch.empty(40, 30)}, exact_or_bf16, pump, knows=True)
    (bucket,) = measured.facts(LINKS, exact_or_bf16, BUCKET_BYTES)[-1].buckets
    assert all(o is not None and o.loss < 1e-3 for o in bucket.options)


def test_of_a_table_what_any_rank_has_looked_up_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of three ranks looked up a tenth of the rows: three tenths are sent at most, and a bucket with what is not
    sparse is not served. What is sent is timed as sparse as it is.
    """
    occupied, table, head = list[float](), "table", "head"
    params = {table: torch.empty(640, 1024), head: torch.empty(640, 1024)}

    def turn_seconds_of(one: object, where: object, levels: object, rank: int, part: float) -> tuple[float, ...]:
        occupied.append(part)
        return (0.01, 0.01, 0.01)

    def facts(channel: Channel) -> list[StepMeasurements]:
        gradients = {n: torch.zeros(p.shape) for n, p in params.items()}
        gradients[table][64 * channel.rank : 64 * (channel.rank + 1)] = 1.0
        gradients[head] += 1.0
        rehearsal = StepProfile(0.9, 0.3, {table: 0.3, head: 0.1}, gradients)
        pump: Any = SimpleNamespace(channel=channel)
        measured = ExchangeProfile.by(rehearsal, params, CANDIDATES, pump, knows=True)
        assert measured.occupied == pytest.approx({table: 0.3, head: 1.0})
        return list(measured.facts(LINKS, CANDIDATES, 1 << 24))

    monkeypatch.setattr(exchange_profile, "encode_slowdown", lambda: 0.25)
    monkeypatch.setattr(exchange_methods, "turn_seconds_of", turn_seconds_of)
    sparse = next(c for c, one in enumerate(CANDIDATES) if one.written == "block_sparse")
    found = in_threads(facts)
    assert found[0] == found[1] == found[2]
    apart, together = found[0][0], found[0][-1]
    assert [b.names for b in apart.buckets] == [(head,), (table,)] and len(together.buckets) == 1
    assert [b.options[sparse] is not None for b in (*apart.buckets, *together.buckets)] == [False, True, False]
    (bitmap, rows), (whole,) = apart.buckets[1].option(sparse).messages, apart.buckets[1].option(0).messages
    assert rows.busy_s == pytest.approx(0.3 * whole.busy_s, rel=1e-3) and bitmap.busy_s < 0.01 * whole.busy_s
    assert (min(occupied), max(occupied)) == (pytest.approx(0.3), 1.0)


@pytest.mark.parametrize("lossy", [False, True])
def test_a_gradient_that_is_zero_at_first_counts_as_the_others(monkeypatch: pytest.MonkeyPatch, lossy: bool) -> None:
    """Behind a head, or an adapter, that begins at zero; after one step it is dense. One on which no loss depends is
    sent as sparse.
    """
    monkeypatch.setattr(exchange_profile, "encode_slowdown", lambda: 0.25)
    monkeypatch.setattr(exchange_methods, "turn_seconds_of", lambda *_: (1e-3,) * 3)
    monkeypatch.setattr(exchange_profile, "time", SimpleNamespace(perf_counter=float, thread_time=float))
    rng = torch.Generator().manual_seed(1)
    sizes = {"head": (16, 1024), "trunk": (1024, 1024)}
    noise = {n: 3.0 * torch.randn(shape, generator=rng) for n, shape in sizes.items()}
    params = {n: torch.empty(shape) for n, shape in sizes.items()}
    links = Network(islands=((0, 1),), levels={"all": Link(latency_s=1e-3, bytes_per_s=2e6)})

    def of(trunk: torch.Tensor, absent: frozenset[str] = frozenset()) -> tuple[ExchangeProfile, Decision]:
        rehearsal = StepProfile(0.3, 0.2, dict.fromkeys(params, 0.2), {**noise, "trunk": trunk}, absent)
        pump: Any = SimpleNamespace(channel=LoopbackChannel(0, ProcessGroups.flat(2)))
        found = ExchangeProfile.by(rehearsal, params, CANDIDATES, pump, knows=True)
        return found, choose(*found.facts(links, CANDIDATES, 1 << 28), lossy=lossy, candidates=CANDIDATES)

    (later, usual), (first, begun) = of(noise["trunk"]), of(torch.zeros(1024, 1024))
    assert first.idle == {"trunk"} and later.idle == frozenset() and first.occupied["trunk"] == 1.0
    assert begun.written == usual.written and "sparse" not in begun.summary
    assert begun.forecast.exposed_s == pytest.approx(usual.forecast.exposed_s, rel=0.25)
    assert first.squares["trunk"] == pytest.approx(later.squares["trunk"], rel=0.05)
    for name, lost in first.lost.items():
        assert lost["trunk"] == pytest.approx(later.lost[name]["trunk"], rel=0.1, abs=1e-3)
    unused, spared = of(torch.zeros(1024, 1024), frozenset({"trunk"}))
    assert unused.idle == frozenset() and unused.occupied["trunk"] == 0.0
    assert spared.forecast.sent_bytes[0] < 0.1 * usual.plain.sent_bytes[0]


def test_rows_in_use_are_those_of_all_micro_batches_at_most(by_rank: Any) -> None:
    (channel,) = LocalChannel.world(1)
    table = torch.zeros(640, 64)
    table[:32] = 1.0
    pump: Any = SimpleNamespace(channel=channel)
    for count, part in ((1, 0.05), (8, 0.4), (32, 1.0)):
        rehearsal = StepProfile(0.9, 0.3, {"table": 0.3}, {"table": table}, microbatches=count)
        measured = ExchangeProfile.by(rehearsal, {"table": torch.empty(640, 64)}, CANDIDATES[:1], pump, knows=True)
        assert measured.occupied["table"] == pytest.approx(part)


@pytest.mark.parametrize("sharding", ["zero1", "zero2"])
def test_with_sharded_states_what_is_priced_is_what_is_sent(monkeypatch: pytest.MonkeyPatch, sharding: str) -> None:
    """Means go to the owners of states: an all-reduce is half of one, a two-shot its first half."""
    monkeypatch.setattr(exchange_profile, "encode_slowdown", lambda: 0.25)
    levels, one = ProcessGroups.flat(2), sharding_methods.build(sharding, key="plan.sharding")
    params = {"a": torch.empty(512, 256), "b": torch.empty(512)}
    rehearsal = StepProfile(0.3, 0.2, dict.fromkeys(params, 0.2), {n: torch.randn(p.shape) for n, p in params.items()})
    pump: Any = SimpleNamespace(channel=LoopbackChannel(0, levels))

    def as_sent(given: Exchange) -> Exchange:
        return one.exchange(given, one.deal(levels).path)

    measured = ExchangeProfile.by(rehearsal, params, CANDIDATES, pump, knows=True, as_sent=as_sent)
    links = Network(islands=((0, 1),), levels={"all": Link(latency_s=1e-3, bytes_per_s=2e6)})
    (bucket,) = measured.facts(links, CANDIDATES, 1 << 28)[-1].buckets
    where = Layout.of({n: params[n] for n in bucket.names})
    served = 0
    for candidate, option in zip(CANDIDATES, bucket.options, strict=True):
        if option is not None:
            sent = as_sent(ParameterRules.single(candidate.written))
            by_rank = {rank: tuple(sent.expected_traffic(where, levels, rank, 1.0)) for rank in (0, 1)}
            assert option.messages == priced(by_rank, levels, links, MessagePrice())[0], candidate.said
            served += 1
    whole = sum(p.nbytes for p in params.values())
    assert served > 5 and sum(m.busy_s for m in bucket.option(0).messages) * 2e6 == pytest.approx(whole / 2, rel=0.01)


@pytest.mark.parametrize("sharding", ["none", "zero1"])
@pytest.mark.parametrize("sizes", [(20, 20), (4, 4, 64), (24, 3, 6)])
def test_of_large_islands_the_owners_of_a_bucket_are_priced(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], sharding: str
) -> None:
    """A tensor that is a bucket of its own lies with one rank in the middle of its island, or a part with each. Owners
    of the largest island receive most inside it.
    """
    monkeypatch.setattr(exchange_profile, "encode_slowdown", lambda: 0.25)
    ends = [sum(sizes[: k + 1]) for k in range(len(sizes))]
    islands = tuple(tuple(range(end - size, end)) for size, end in zip(sizes, ends, strict=True))
    levels, params = ProcessGroups.islands(islands), {"a": torch.empty(512, 256)}
    states = sharding_methods.build(sharding)

    def as_sent(one: Exchange) -> Exchange:
        return states.exchange(one, states.path(levels)) if states.is_sharded else one

    rehearsal = StepProfile(0.3, 0.2, {"a": 0.2}, {"a": torch.randn(512, 256)})
    candidates = [one for one in across_islands(CANDIDATES) if "hierarchical" in str(one.written)][:2]
    pump: Any = SimpleNamespace(channel=LoopbackChannel(0, levels))
    measured = ExchangeProfile.by(rehearsal, params, candidates, pump, knows=True, as_sent=as_sent)
    link = Link(latency_s=1e-3, bytes_per_s=2e6)
    between = link.model_copy(update={"alone_bytes_per_s": 20 * 2e6})
    links = Network(islands=islands, levels={"all": link, "island": link, "between": between})
    (bucket,) = measured.facts(links, candidates, 1 << 28)[-1].buckets
    where = Layout.of({n: params[n] for n in bucket.names})
    for candidate, option in zip(candidates, bucket.options, strict=True):
        exchange = as_sent(exchange_methods.build(candidate.written))
        by_rank = {rank: tuple(exchange.expected_traffic(where, levels, rank, 1.0)) for rank in range(ends[-1])}
        assert option is not None
        assert option.messages == priced(by_rank, levels, links, MessagePrice())[0], candidate.said
        assert sum(m.busy_s for m in option.messages) > 0.01


def test_parts_of_the_only_gradient_encode_as_long_as_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that is trained alone is timed whole and in parts: a part is not taken to cost what the table costs."""
    monkeypatch.setattr(exchange_profile, "encode_slowdown", lambda: 0.0)
    timed = lambda one, where, levels, rank, occupied: (5e-9 * where.numel,) * 3  # noqa: E731
    monkeypatch.setattr(exchange_methods, "turn_seconds_of", timed)
    params = {"table": torch.empty(3000, 1024)}
    rehearsal = StepProfile(0.3, 0.2, {"table": 0.2}, {"table": torch.randn(3000, 1024)})
    pump: Any = SimpleNamespace(channel=LoopbackChannel(0, ProcessGroups.flat(2)))
    measured = ExchangeProfile.by(rehearsal, params, CANDIDATES, pump, knows=True)
    links = Network(islands=((0, 1),), levels={"all": Link(latency_s=1e-4, bytes_per_s=2e8)})
    cuts = measured.facts(links, CANDIDATES, 1 << 28, divides=True)
    took = {len(cut.buckets): sum(b.option(INT8).cpu_s for b in cut.buckets) for cut in cuts}
    assert len(took) > 2 and took == pytest.approx(dict.fromkeys(took, took[1]), rel=0.2)


def test_between_islands_encoding_takes_as_long_as_the_part_that_an_owner_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices are dealt to the eight ranks of an island; a table lies with one of them."""
    monkeypatch.setattr(exchange_profile, "encode_slowdown", lambda: 0.0)
    levels = ProcessGroups.islands((tuple(range(8)), tuple(range(8, 16))))

    def timed(one: Exchange, where: Layout, levels: ProcessGroups, rank: int, occupied: float) -> tuple[float, ...]:
        return (1e-9 * max(one.owner_numels(where, levels)),) * 5

    monkeypatch.setattr(exchange_methods, "turn_seconds_of", timed)
    params = {f"w{k}": torch.empty(512, 512) for k in range(16)} | {"table": torch.empty(8192, 512)}
    gradients = {n: torch.ones_like(p) for n, p in params.items()}
    rehearsal = StepProfile(0.3, 0.2, dict.fromkeys(params, 0.2), gradients)
    kinds = tuple(one for one in across_islands(CANDIDATES) if one.said.startswith("int8 two"))
    pump: Any = SimpleNamespace(channel=LoopbackChannel(0, levels))
    measured = ExchangeProfile.by(rehearsal, params, kinds, pump, knows=True)
    link = Link(latency_s=1e-3, bytes_per_s=2e6)
    links = Network(islands=levels.groups["island"], levels=dict.fromkeys(("all", "island", "between"), link))
    tables = [b for cut in measured.facts(links, kinds, 1 << 28) for b in cut.buckets if b.names == ("table",)]
    assert tables and all(b.option(0).cpu_s == pytest.approx(5e-9 * 8192 * 512, rel=0.1) for b in tables)


def test_buckets_of_one_shape_and_two_types_have_two_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_profile, "encode_slowdown", lambda: 0.0)
    monkeypatch.setattr(exchange_methods, "turn_seconds_of", lambda one, where, levels, rank, occupied: (1e-4,))
    params = {"a": torch.empty(512, 512), "b": torch.empty(512, 512, dtype=torch.bfloat16)}
    gradients = {n: torch.ones_like(p) for n, p in params.items()}
    rehearsal = StepProfile(0.3, 0.2, dict.fromkeys(params, 0.2), gradients)
    pump: Any = SimpleNamespace(channel=LoopbackChannel(0, ProcessGroups.flat(2)))
    measured = ExchangeProfile.by(rehearsal, params, CANDIDATES[:1], pump, knows=True)
    links = Network(islands=((0, 1),), levels={"all": Link(latency_s=1e-4, bytes_per_s=2e8)})
    for cut in measured.facts(links, CANDIDATES[:1], 1 << 28):
        busy_s = {b.names: sum(m.busy_s for m in b.option(0).messages) for b in cut.buckets}
        assert busy_s[("b",)] == pytest.approx(busy_s[("a",)] / 2, rel=0.01)


@pytest.mark.parametrize("path", [("island", "between"), ("island",)])
def test_rows_in_use_are_few_between_islands_of_sharded_states_too(path: tuple[str, ...]) -> None:
    levels, layout = (
        ProcessGroups.islands(((0, 1), (2, 3))),
        Layout.of({"table": torch.empty(4096, 256, device="meta")}),
    )
    given = exchange_methods.build({"hierarchical": {"inter": "block_sparse"}})
    one = sharding_methods.build("zero1").exchange(given, path)
    some, whole = (
        sum(t.nbytes for t in one.expected_traffic(layout, levels, 0, part) if t.level == "between")
        for part in (0.02, 1.0)
    )
    assert some < 0.1 * whole


def test_a_gradient_that_is_most_of_the_model_may_be_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parts have buckets of their own, weigh together what it weighs, and are ready when it is. On a link that is
    busy for most of the step they are sent while others are encoded; what is chosen can be read back.
    """
    monkeypatch.setattr(exchange_profile, "encode_slowdown", lambda: 0.0)
    monkeypatch.setattr(
        exchange_methods,
        "turn_seconds_of",
        lambda one, where, levels, rank, occupied: (5e-9 * where.numel,) * 3,
    )
    params = {"small": torch.empty(300, 100), "table": torch.empty(3000, 1024)}
    rng = torch.Generator().manual_seed(0)
    gradients = {n: torch.randn(p.shape, generator=rng) for n, p in params.items()}
    rehearsal = StepProfile(0.3, 0.2, {"small": 0.02, "table": 0.2}, gradients)
    pump: Any = SimpleNamespace(channel=LoopbackChannel(0, ProcessGroups.flat(2)))
    measured = ExchangeProfile.by(rehearsal, params, CANDIDATES, pump, knows=True)
    links = Network(islands=((0, 1),), levels={"all": Link(latency_s=1e-4, bytes_per_s=2e8)})
    whole = measured.facts(links, CANDIDATES, 1 << 28)
    both = measured.facts(links, CANDIDATES, 1 << 28, divides=True)
    assert both[: len(whole)] == whole and len(both) > len(whole)
    for cut in both[len(whole) :]:
        parts = [b for b in cut.buckets if b.names[0].startswith("table[")]
        assert len(parts) >= 2 and all(len(b.names) == 1 and b.ready_s == 0.2 for b in parts)
        assert sum(b.numel for b in cut.buckets) == 3000 * 1024 + 300 * 100
        table = next(b for b in whole[0].buckets if b.names == ("table",))
        assert sum(b.weight for b in parts) == pytest.approx(table.weight)
        assert [b.options[INT8].loss for b in parts] == pytest.approx([table.options[INT8].loss] * len(parts))
    kinds = (CANDIDATES[0], CANDIDATES[INT8])
    alone, better = (
        choose(*measured.facts(links, kinds, 1 << 28, divides=one), lossy=True, candidates=kinds)
        for one in (False, True)
    )
    assert better.forecast.exposed_s < 0.9 * alone.forecast.exposed_s
    names = {n for names in better.buckets for n in names}
    assert any(n.startswith("table[") for n in names)
    found = ParameterRules.read(better.written, parts=parts_in(better.buckets)).by_name(params)
    assert names <= set(found) | {"small"}


def test_gradients_are_cut_as_by_hand_too_and_no_way_to_cut_them_is_tried_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Among the cuts are 25 MiB, which is usual, half of all, and buckets that become smaller towards the end."""
    monkeypatch.setattr(exchange_profile, "encode_slowdown", lambda: 0.0)
    monkeypatch.setattr(exchange_methods, "turn_seconds_of", lambda one, where, levels, rank, occupied: (1e-3, 1e-3))
    params = {f"w{n}": torch.empty(1 << 9, 1 << 9) for n in range(60)}  # 1 MiB each
    rehearsal = StepProfile(0.3, 0.2, dict.fromkeys(params, 0.2), {n: torch.zeros(p.shape) for n, p in params.items()})
    pump: Any = SimpleNamespace(channel=LoopbackChannel(0, ProcessGroups.flat(2)))
    measured = ExchangeProfile.by(rehearsal, params, CANDIDATES[:1], pump, knows=False)
    cuts = [[b.numel * 4 >> 20 for b in cut.buckets] for cut in measured.facts(LINKS, CANDIDATES[:1], 1 << 28)]
    assert [25, 25, 10] in cuts and [30, 30] in cuts and [60] in cuts
    assert [15, 15, 15, 7, 4, 2, 1, 1] in cuts, cuts
    assert len(cuts) == len({tuple(cut) for cut in cuts})


def adapting(*, every: int, window: int, waited: dict[str, float], chosen: list[Statistics]) -> AdaptiveCompression:
    """Of two parameters, whose gradient at a step is 10^step; the policy keeps what it is asked."""
    step = [0]

    def gradients() -> dict[str, torch.Tensor]:
        step[0] += 1
        return {name: torch.full((3,), 10.0 ** step[0]) for name in ("a", "b")}

    def choose(statistics: Statistics, paths: object) -> AdaptChoices:
        chosen.append(statistics)
        return AdaptChoices(((".*", "all", "dense"),), "")

    policy: Any = SimpleNamespace(needs_paths=False, choose=choose, to_measure=lambda w, near: ("dense", {"topk": {}}))
    replica: Any = SimpleNamespace(
        names=("a", "b"),
        rank=0,
        ranks=1,
        levels=ProcessGroups.flat(1),
        gradients=gradients,
        gather=lambda row: torch.tensor([row], dtype=torch.float64),
    )
    plan = SimpleNamespace(exchange="dense", adapted_from="", buckets=())
    exchanger: Any = SimpleNamespace(plan=plan, waited=lambda: waited, change=lambda *given, **more: None)
    return AdaptiveCompression(policy=policy, every=every, window=window, exchanger=exchanger, replica=replica)


def test_a_window_is_the_last_steps_before_a_choice_and_no_more() -> None:
    one = adapting(every=5, window=2, waited={}, chosen=[])
    for step in range(1, 5):
        one.replan(step)
    assert one._count == 1 and one._sums["a"].tolist() == [10.0] * 3, "the first of the two"
    seen: list[Statistics] = []
    one = adapting(every=5, window=2, waited={}, chosen=seen)
    for step in range(1, 6):
        one.replan(step)
    (statistics,) = seen
    assert one._count == 0 and statistics.exposed == ()
    assert statistics.error[0][1] == pytest.approx(2**0.5 * (10.0 + 100.0) / 2), "the mean of both, but for one entry"


def test_what_nobody_waits_for_hardly_counts_where_it_is_known() -> None:
    seen: list[Statistics] = []
    one = adapting(every=1, window=1, waited={"a": 0.0, "b": 0.8}, chosen=seen)
    one.replan(1)
    assert seen[0].names == ("a", "b") and seen[0].exposed == (0.05, 0.8)


def test_rules_of_parts_stay_where_their_parameter_is_not_adapted() -> None:
    fed_back = {"error_feedback": {"two_shot": "int8"}}
    base = [(r"^(a\[0:2\])$", "all", fed_back), (r"^(b\[0:2\])$", "all", fed_back), (".*", "all", "dense")]
    one, found = adapting(every=1, window=1, waited={}, chosen=[]), list[Any]()
    one.exchanger.plan.exchange = base
    one.exchanger.plan.buckets = (("a[0:2]",), ("a[2:3]",), ("b[0:2]",), ("b[2:3]",))
    one.exchanger.change = lambda written, *given, **more: found.append(written)  # type: ignore[method-assign]
    one.policy.choose = lambda statistics, paths: AdaptChoices(  # type: ignore[method-assign]
        (("^b$", "all", "topk"), (".*", "all", "dense")), ""
    )
    one.replan(1)
    assert found == [[("^(b)$", "all", "topk"), base[0], base[2]]]


def test_encode_times_of_other_sizes_lie_between_those_that_were_timed() -> None:
    times = EncodeTimes(((100, (1.0, 2.0)), (300, (3.0, 2.0)), (1000, (10.0, 9.0))))
    assert times.of(100, 2) == (1.0, 2.0) and times.of(200, 2) == pytest.approx((2.0, 2.0))
    assert times.of(10, 2) == (1.0, 2.0), "a call takes its time, whatever it is for"
    assert times.of(3000, 2) == pytest.approx((30.0, 27.0)), "beyond, as much more as there is more"
    assert times.of(100, 1) == (3.0,) and times.of(100, 4) == (1.0, 2.0, 0.0, 0.0), "of exchanges with other messages"


def test_thousands_of_small_gradients_are_measured_in_a_few_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large one by itself, the small ones in one bucket, whose errors are those that each has by itself."""
    torch.manual_seed(5)
    params = {f"s{i}": torch.empty(256) for i in range(300)} | {"large": torch.empty(80, 64)}
    gradients = {n: torch.randn(p.shape) for n, p in params.items()}
    calls: list[list[str]] = []
    measure = exchange_methods.errors_of

    def counted(exchange: Any, tensors: Any) -> dict[str, float]:
        calls.append(list(tensors))
        return measure(exchange, tensors)

    monkeypatch.setattr(exchange_methods, "errors_of", counted)
    monkeypatch.setattr(exchange_profile, "encode_slowdown", lambda: 0.0)
    pump: Any = SimpleNamespace(channel=LocalChannel.world(1, ProcessGroups.flat(1))[0])
    rehearsal = StepProfile(1.0, 0.5, dict.fromkeys(params, 0.5), gradients)
    candidate = CANDIDATES[INT8]
    found = ExchangeProfile.by(rehearsal, params, [candidate], pump, knows=True).lost[told(candidate.loses_as)]
    assert calls == [["large"], [f"s{i}" for i in range(300)]]
    alone = ParameterRules.single(candidate.loses_as)
    for name in ("s0", "s299", "large"):
        assert found[name] == pytest.approx(exchange_methods.error_of(alone, gradients[name]) ** 2, rel=1e-5)


def test_a_small_gradient_that_cannot_be_served_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def picky(exchange: Any, tensors: Any) -> dict[str, float]:
        if "odd" in tensors:
            raise BadInput("no such tensor is served")
        return dict.fromkeys(tensors, 2.0)

    monkeypatch.setattr(exchange_methods, "errors_of", picky)
    gradients = {name: torch.ones(8) for name in ("a", "odd", "b")}
    found = rehearsed_gradients.lost_of(CANDIDATES[INT8], gradients)
    assert (found["a"], found["b"]) == (4.0, 4.0)
    assert math.isnan(found["odd"])


def test_groups_of_the_same_choice_keep_the_levels_of_their_lines() -> None:
    written, now = ({"error_feedback": {"powersgd": {"rank": rank}}} for rank in (4, 6))
    rules = [["^embed", "all", written], ["^layers", "inter", written], ["^layers", "intra", "dense"]]
    plan = SimpleNamespace(exchange=rules, adapted_from="", buckets=())
    replica: Any = SimpleNamespace(names=("embed.weight", "layers.0.weight"))
    exchanger: Any = SimpleNamespace(plan=plan)
    policy: Any = None
    one = AdaptiveCompression(policy=policy, every=20, window=20, exchanger=exchanger, replica=replica)
    found = one._with({"embed.weight": ("all", now), "layers.0.weight": ("inter", now)})
    levels = {
        name: level for name in ("embed", "layers") for pattern, level, w in found if name in pattern and w == now
    }
    assert levels == {"embed": "all", "layers": "inter"}
