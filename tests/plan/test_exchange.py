"""The choice of exchanges: a pure function, checked against brute force and on cases whose answer is known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from itertools import combinations_with_replacement, product

import pytest
import torch

from gossamer import exchange as exchange_methods
from gossamer.comm.bucket import Layout
from gossamer.comm.message import Collective, ProcessGroups, Traffic
from gossamer.comm.meter import hop_count
from gossamer.plan.exchange import (
    CANDIDATES,
    BucketMeasurements,
    Candidate,
    Option,
    PricedMessage,
    StepMeasurements,
    across_islands,
    choose,
    choose_uniform,
    cost_of_step,
    priced,
    step_search,
    tasks_of_step,
    waited_for,
    wire_seconds,
)
from gossamer.plan.exchange.send_order import Job
from gossamer.plan.exchange.step_search import SLACK, Mixture, SingleCandidates, search
from gossamer.recipe import ParameterRules
from gossamer.spec.clock import play
from gossamer.spec.cost import Cost
from gossamer.spec.errors import BadInput
from gossamer.spec.network import Link, Network
from gossamer.spec.units import show_seconds

EXACT, HALF, LOSSY, HARSH = (
    Candidate("dense", "all-reduce", lossy=False),
    Candidate({"two_shot": {"codec": "bfloat16"}}, "bf16", lossy=False),
    Candidate({"error_feedback": {"two_shot": "int8"}}, "int8"),
    Candidate({"error_feedback": {"two_shot": "sign"}}, "sign"),
)
KINDS = (EXACT, HALF, LOSSY, HARSH)
RATIO = (1.0, 0.5, 0.26, 0.04)
LOSS = (0.0, 1e-5, 1e-4, 0.36)


def facts(
    bytes_per_s: float, *, buckets: int = 4, numel: int = 1 << 20, cpu_s: float = 0.0, stolen: float = 0.0
) -> StepMeasurements:
    """Equal buckets that fill one after the other in a backward pass of one second; compute takes 1.5 s."""
    made = []
    for b in range(buckets):
        options = tuple(
            Option.of_one_message(cpu_s * (c > 0), 4 * numel * r / bytes_per_s, int(4 * numel * r), LOSS[c])
            for c, r in enumerate(RATIO)
        )
        made.append(BucketMeasurements((f"block.{b}.w",), numel, (b + 1) / buckets, 1 / buckets, options))
    return StepMeasurements(tuple(made), compute_s=1.5, backward_s=1.0, stolen=stolen)


def cost_with(known: StepMeasurements, chosen: Sequence[Option | None]) -> Cost:
    """The cost of a step with one option for each bucket."""
    return cost_of_step(known, play(tasks_of_step(known, [o for o in chosen if o is not None])))


def test_a_fast_link_keeps_the_plain_all_reduce() -> None:
    decision = choose(facts(10e9), lossy=True, candidates=KINDS)
    assert decision.written == "dense"
    assert decision.forecast == decision.plain and "all-reduce" in decision.reason


def test_of_cuts_forecast_alike_the_one_with_the_fewest_buckets_is_taken() -> None:
    many, few = facts(1e10, buckets=32, numel=1 << 15), facts(1e10, buckets=4, numel=1 << 18)
    for cuts in ((many, few), (few, many)):
        assert len(choose(*cuts, lossy=True, candidates=KINDS).buckets) == 4


def test_fewer_buckets_are_not_taken_where_the_last_of_them_is_waited_for() -> None:
    many, few = facts(4e6, buckets=32, numel=1 << 15), facts(4e6, buckets=4, numel=1 << 18)
    assert len(choose(few, many, lossy=False, candidates=KINDS[:1]).buckets) == 32


def test_what_hides_under_backward_stays_exact() -> None:
    """The wire keeps up with the backward pass; only the last bucket is waited for, and only it is compressed."""
    decision = choose(facts(20e6, buckets=4), lossy=True, candidates=KINDS)
    assert isinstance(decision.written, list)
    patterns = {str(written): pattern for pattern, _, written in decision.written}
    assert decision.forecast.exposed_s < 0.5 * decision.plain.exposed_s
    assert "dense" in patterns, "nothing was left exact"
    compressed = [p for w, p in patterns.items() if w != "dense"]
    assert any("block\\.3" in p or p == ".*" for p in compressed)


def test_without_lossy_nothing_lossy_is_chosen_and_the_gain_is_told() -> None:
    decision = choose(facts(2e6), lossy=False, candidates=KINDS)
    assert decision.written == {"two_shot": {"codec": "bfloat16"}}
    assert "plan.lossy: true" in decision.reason and "sign" in decision.reason


def test_the_searches_of_a_choice_make_and_time_each_candidate_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is lossy is looked at too, for the reason; not where a step already takes what it computes."""
    choose_module = import_module("gossamer.plan.exchange.choose")
    made, searched, job_of, search = list[int](), list[int](), step_search.job_of, choose_module.search

    def counted(ready_s: float, option: Option) -> Job:
        made.append(id(option))
        return job_of(ready_s, option)

    def watched(cuts: Sequence[StepMeasurements], usable: Sequence[int], singles: SingleCandidates) -> Mixture:
        searched.append(len(usable))
        return search(cuts, usable, singles)

    monkeypatch.setattr(step_search, "job_of", counted)
    monkeypatch.setattr(choose_module, "search", watched)
    cuts = facts(2e6), facts(2e6, buckets=8)
    assert "plan.lossy: true" in choose(*cuts, lossy=False, candidates=KINDS).reason
    assert len(made) == len(set(made)) == 12 * len(KINDS) and searched == [2, 4]
    assert "plan.lossy" not in choose(facts(10e9), lossy=False, candidates=KINDS).reason and searched == [2, 4, 2]


def test_a_very_slow_link_takes_the_harshest() -> None:
    decision = choose(facts(1e5), lossy=True, candidates=KINDS)
    assert decision.forecast.step_s < 0.1 * decision.plain.step_s
    chosen = str(decision.written)
    assert "sign" in chosen


def test_encoding_that_costs_more_than_it_saves_is_left() -> None:
    """No core to spare, and encoding takes longer than the bytes it removes."""
    cheap = choose(facts(40e6, cpu_s=0.001, stolen=1.0), lossy=True, candidates=KINDS)
    dear = choose(facts(40e6, cpu_s=0.5, stolen=1.0), lossy=True, candidates=KINDS)
    assert cheap.written != "dense" and dear.written == "dense"


@pytest.mark.parametrize("bytes_per_s", [5e5, 2e6, 8e6, 2e7, 6e7, 2e8])
@pytest.mark.parametrize("stolen", [0.0, 1.0])
def test_never_slower_than_plain_and_as_good_as_trying_everything(bytes_per_s: float, stolen: float) -> None:
    """Within the slack of the fastest of all 4^6 mixtures; no other that is as fast loses much less."""
    known = facts(bytes_per_s, buckets=6, cpu_s=0.01, stolen=stolen)
    decision = choose(known, lossy=True, candidates=KINDS)
    assert decision.forecast.step_s <= decision.plain.step_s

    def steps(picks) -> float:
        return cost_with(known, [b.options[c] for b, c in zip(known.buckets, picks, strict=True)]).step_s

    fastest = min(steps(picks) for picks in product(range(4), repeat=6))
    assert decision.forecast.step_s <= (1 + SLACK) * 1.005 * fastest
    ordered = [
        picks for picks in combinations_with_replacement(range(4), 6) if steps(picks) <= decision.forecast.step_s
    ]
    least = min(sum(LOSS[c] for c in picks) for picks in ordered)
    assert decision.best.lost * 6 <= least + 0.01


@pytest.mark.parametrize("bytes_per_s", [4e6, 20e6, 1e9])
@pytest.mark.parametrize("lossy", [True, False])
def test_uniform_choices_are_those_of_all_candidates_shortest_first(bytes_per_s: float, lossy: bool) -> None:
    cuts = [facts(bytes_per_s, buckets=count, numel=(1 << 22) // count, cpu_s=1e-3) for count in (1, 4, 8)]
    found = choose_uniform(*cuts, lossy=lossy, within=0.25, candidates=KINDS)

    def step_s(cut: StepMeasurements, c: int) -> float:
        return cost_with(cut, [bucket.options[c] for bucket in cut.buckets]).step_s

    allowed = [c for c, one in enumerate(KINDS) if c == 0 or one.lossy <= lossy]
    each = sorted(min(step_s(cut, c) for cut in cuts) for c in allowed)
    assert [one.best.step_s for one in found] == pytest.approx([s for s in each if s <= 1.25 * each[0]])
    assert all(len(set(one.best.picked)) == 1 for one in found)


def test_what_hides_is_not_waited_for_and_what_delays_all_after_it_is() -> None:
    hidden = facts(20e6, buckets=4)
    first = [bucket.options[0] for bucket in hidden.buckets]
    assert waited_for(hidden, first) == pytest.approx((0, 0, 0, 1)), "only the last bucket is under way at the end"
    slow = facts(2e6, buckets=4)
    assert waited_for(slow, [b.options[0] for b in slow.buckets]) == pytest.approx((1, 1, 1, 1))
    decision = choose(hidden, lossy=False, candidates=KINDS)
    assert sorted(decision.waited()) == [f"block.{b}.w" for b in range(4)]


def test_what_is_waited_for_is_saved_by_half_of_the_bytes_and_not_by_their_latency() -> None:
    """Two messages of 1 s, ready 0.9 s and 0 s before the pass ends: of the 1 s of half of both 0.6 s is saved."""
    one = Option((0.0, 0.0), (PricedMessage(1.0, latency_s=0.01),), 8, 0.0)
    buckets = tuple(BucketMeasurements((f"w[{i}:{i + 1}]",), 1, at, 0.0, (one,)) for i, at in enumerate((0.1, 1.0)))
    known = StepMeasurements(buckets, compute_s=1.5, backward_s=1.0, stolen=0.0)
    assert waited_for(known, [one, one], [[0, 1]]) == pytest.approx((0.6,))
    parts = choose(known, lossy=False, candidates=KINDS[:1]).waited()
    assert parts == pytest.approx({"w": sum(waited_for(known, [one, one])) / 2}), "policies know parameters, not parts"


def bucket_of(ready_s: float, cpu_s: float, wire_s: float) -> BucketMeasurements:
    return BucketMeasurements(("w",), 1, ready_s, 1.0, (Option.of_one_message(cpu_s, wire_s, 8, 0.0),))


def line_of(*buckets: BucketMeasurements, stolen: float = 0.0) -> Cost:
    known = StepMeasurements(buckets, compute_s=1.5, backward_s=1.0, stolen=stolen)
    return cost_with(known, [b.options[0] for b in buckets])


def test_encoding_and_decoding_beside_backward_make_it_longer_by_what_they_steal() -> None:
    """0.4 s of coding, all done before the backward pass would have ended, of which each half takes its part."""
    early = bucket_of(ready_s=0.2, cpu_s=0.4, wire_s=0.1)
    assert line_of(early).step_s == pytest.approx(1.5)
    assert line_of(early, stolen=1.0).step_s == pytest.approx(1.9)
    assert line_of(early, stolen=0.5).step_s == pytest.approx(1.7)
    beside = bucket_of(ready_s=0.6, cpu_s=0.4, wire_s=5.0)  # decoded when nothing is left to steal from
    assert line_of(beside, stolen=1.0).step_s == pytest.approx(1.5 + 0.2 + (0.6 + 0.4 + 5.0 + 0.2 - 1.2)), (
        "which encodes at half the speed"
    )
    after = bucket_of(ready_s=1.0, cpu_s=0.4, wire_s=0.1)
    assert line_of(after, stolen=1.0).step_s == pytest.approx(1.5 + 0.5)


def test_one_thread_encodes_and_decodes_one_bucket_at_a_time() -> None:
    both = bucket_of(ready_s=1.0, cpu_s=0.4, wire_s=0.0)
    assert line_of(both, both).exposed_s == pytest.approx(4 * 0.2)
    encoding_last = line_of(bucket_of(1.0, 0.2, 0.0), bucket_of(1.0, 2.0, 0.0))  # encoded at 1.1 and 2.1
    assert encoding_last.exposed_s == pytest.approx(0.1 + 1.0 + 0.1 + 1.0)
    wire_last = line_of(bucket_of(1.0, 0.2, 3.0), bucket_of(1.0, 0.2, 1.0))  # arrive at 4.1 and 5.1
    assert wire_last.exposed_s == pytest.approx(0.1 + 3.0 + 1.0 + 0.1)


def test_a_rule_for_every_parameter() -> None:
    """What is written can be read back, and serves every name."""
    decision = choose(facts(20e6), lossy=True, candidates=KINDS)
    rules = ParameterRules.read(decision.written)
    names = [n for b in facts(20e6).buckets for n in b.names]
    assert set(rules.by_name(names)) == set(names)


def test_islands_are_compressed_between_only() -> None:
    wide = across_islands(KINDS)
    assert wide[0] == EXACT and len(wide) == 1 + len(KINDS)
    for candidate in wide[1:]:
        assert (
            exchange_methods.build(candidate.written).check(_layout(), ProcessGroups.islands([[0, 1], [2, 3]])) is None
        )


def _layout():
    import torch

    from gossamer.comm.bucket import Layout

    return Layout.of({"w": torch.empty(64, 64)})


def test_a_model_without_buckets_has_nothing_to_choose() -> None:
    decision = choose(StepMeasurements((), compute_s=1.0, backward_s=0.5, stolen=0.0), lossy=True)
    assert decision.written == "dense" and decision.forecast.step_s == 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_facts_take_no_number_that_is_none(bad: float) -> None:
    """Nothing is less than it, so the choice would rest on nothing. An infinite latency is one of them."""
    option = Option.of_one_message(0.1, 0.2, 100, 0.0)
    with pytest.raises(BadInput, match=r"finite backward_s, got"):
        StepMeasurements((), compute_s=1.0, backward_s=bad, stolen=0.0)
    sicknesses = {
        "cpu_s": replace(option, turns_s=(0.0, bad)),
        "wire_s": replace(option, messages=(PricedMessage(bad),)),
        "loss": replace(option, loss=bad),
        "start_s": replace(option, messages=(PricedMessage(0.2, start_s=bad),)),
    }
    for name, sick in sicknesses.items():
        bucket = BucketMeasurements(("w",), 10, 0.5, 1.0, (option, None, sick))
        with pytest.raises(BadInput, match=rf"finite {name} of candidate 2 for bucket 0, got {bad}"):
            StepMeasurements((bucket,), compute_s=1.0, backward_s=1.0, stolen=0.0)
    with pytest.raises(ValueError, match="finite latency"):
        Link(latency_s=math.inf, bytes_per_s=1e6)
    assert show_seconds(math.inf) == "inf s"


def test_messages_follow_one_another_and_ranks_send_at_once() -> None:
    links = Network(islands=((0, 1),), levels={"all": Link(latency_s=0.01, bytes_per_s=1e6)})
    traffic = (Traffic(Collective.SHUFFLE, 2_000_000, 1), Traffic(Collective.GATHER, 1_000_000, 1))
    seconds, sent = wire_seconds(dict.fromkeys((0, 1), traffic), ProcessGroups.flat(2), links)
    assert seconds == pytest.approx(0.01 + 1.0 + 0.01 + 1.0) and sent == 2_000_000


def test_the_rank_that_sends_most_is_waited_for() -> None:
    links = Network(islands=((0, 1, 2),), levels={"all": Link(latency_s=0.0, bytes_per_s=1e6)})
    sent = {0: (0, 3_000_000, 0), 1: (1_000_000, 0, 500_000), 2: (0, 0, 0)}
    traffic = {r: (Traffic(Collective.SHUFFLE, sum(n), 1, splits=n, arriving=(0, 0, 0)),) for r, n in sent.items()}
    seconds, most = wire_seconds(traffic, ProcessGroups.flat(3), links)
    assert seconds == pytest.approx(3.0) and most == 3_000_000


def test_rows_in_use_are_sent_beside_the_best_of_the_others() -> None:
    """The candidate that serves them alone comes before the one that is best for all other buckets, and after one that
    is worse than any.
    """

    def option(wire_s: float) -> Option:
        return Option((0.0, 0.0), (PricedMessage(wire_s),), int(1e6 * wire_s), 0.0)

    dense, star, bf16 = option(0.8), option(1.6), option(0.4)
    table = BucketMeasurements(("table",), 1000, 0.5, 1 / 3, (dense, star, option(0.01), bf16))
    rest = [BucketMeasurements((f"w{b}",), 1000, 0.2 * b, 1 / 3, (dense, star, None, bf16)) for b in (1, 2)]
    facts = StepMeasurements((*rest, table), compute_s=0.8, backward_s=0.5, stolen=0.0)
    assert search([facts], range(4), SingleCandidates()).picked == (3, 3, 2)


@pytest.mark.parametrize(("alone", "seconds"), [(4e6, (2.0, 2.0)), (1e6, (8.0, 2.0)), (0.0, (8.0, 2.0))])
def test_a_rank_alone_has_the_way_that_its_island_shares(alone: float, seconds: tuple[float, float]) -> None:
    """Four ranks of a host with one uplink for all, and with an uplink each: one of them sends all, or each a part."""
    between = Link(latency_s=0.0, bytes_per_s=1e6, alone_bytes_per_s=alone)
    near = Link(latency_s=0.0, bytes_per_s=1e15)
    islands = ((0, 1, 2, 3), (4, 5, 6, 7))
    links = Network(islands=islands, levels={"all": between, "island": near, "between": between})
    levels, found = ProcessGroups.islands(islands), []
    for entries in (1, 4):
        layout = Layout.of({f"w{i}": torch.empty(2_000_000 // entries, device="meta") for i in range(entries)})
        exchange = exchange_methods.build({"hierarchical": {"inter": {"two_shot": {"codec": "float32"}}}})
        found.append(wire_seconds({r: exchange.traffic(layout, levels, r) for r in range(8)}, levels, links)[0])
    assert found == pytest.approx(seconds, rel=1e-4)


@pytest.mark.parametrize(("inter", "seconds"), [("star", 8.0), ("recursive_doubling", 6.0)])
def test_between_unequal_islands_the_one_that_sends_most_counts(inter: str, seconds: float) -> None:
    """Whichever is the smallest: the hub of a star is in the first island, and doubling leaves one of three idle."""
    far, near = Link(latency_s=0.0, bytes_per_s=1e6), Link(latency_s=0.0, bytes_per_s=1e15)
    layout = Layout.of({n: torch.empty(500_000, device="meta") for n in "ab"})
    exchange, found = exchange_methods.build({"hierarchical": {"inter": inter}}), []
    for islands in (((0, 1), (2, 3), (4, 5, 6, 7)), ((0, 1, 2, 3), (4, 5), (6, 7)), ((0, 1, 2, 3), (4, 5, 6), (7,))):
        levels = ProcessGroups.islands(islands)
        links = Network(islands=islands, levels={"all": far, "island": near, "between": far})
        found.append(wire_seconds({r: exchange.traffic(layout, levels, r) for r in range(8)}, levels, links)[0])
    assert found == pytest.approx([seconds, seconds, 2 * seconds], rel=1e-4), "one owner has twice as much as two"


def test_a_ring_takes_the_rate_of_a_ring() -> None:
    """Of ranks that share a host's way out, all but two send inside the host while a ring sums."""
    link = Link(latency_s=0.0, bytes_per_s=1e6, ring_bytes_per_s=8e6)
    layout, levels = Layout.of({"w": torch.empty(1_000_000, device="meta")}), ProcessGroups.flat(4)
    found = dict[str, float]()
    for name in ("dense", "two_shot"):
        one = exchange_methods.build({name: {"codec": "float32"}} if name == "two_shot" else name)
        for rate, links in (("ring", link), ("all", link.model_copy(update={"ring_bytes_per_s": 0.0}))):
            network = Network(islands=((0, 1, 2, 3),), levels={"all": links})
            sent = {r: one.traffic(layout, levels, r) for r in range(4)}
            found[f"{name} {rate}"] = wire_seconds(sent, levels, network)[0]
    assert found["dense all"] == pytest.approx(8 * found["dense ring"])
    shuffled_s = gathered_s = 3.0  # three quarters of 4 MB each, of which the gather goes around the ring
    assert found["two_shot all"] == pytest.approx(shuffled_s + gathered_s, rel=1e-3)
    assert found["two_shot ring"] == pytest.approx(shuffled_s + gathered_s / 8, rel=1e-3)


def test_of_a_bucket_with_one_owner_its_messages_are_priced() -> None:
    """All other ranks of its island send nothing, those that are numbered first as well."""
    islands = ((0, 1, 2), (3, 4, 5))
    levels = ProcessGroups.islands(islands)
    far = Link(latency_s=0.01, bytes_per_s=1e6)
    links = Network(islands=islands, levels={"all": far, "island": far, "between": far})
    exchange = exchange_methods.build({"hierarchical": {"inter": {"powersgd": {"rank": 2}}}})
    layout = Layout.of({"w": torch.empty(64, 32, device="meta")})
    sent = {r: exchange.traffic(layout, levels, r) for r in range(6)}
    owner = max(sent, key=lambda r: sum(t.nbytes for t in sent[r] if t.level == "between"))
    assert owner != 0
    messages, _ = priced(sent, levels, links)
    hops = [hop_count(t.combine, 2) for t in sent[owner] if t.level == "between"]
    assert [m.hops for m, t in zip(messages, sent[owner], strict=True) if t.level == "between"] == hops


@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda c: c.said)
def test_candidates_can_be_built_and_lossy_ones_remember(candidate: Candidate) -> None:
    exchange = exchange_methods.build(candidate.written)
    assert candidate.lossy == exchange.traits.remembers
