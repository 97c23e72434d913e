"""Star, tree and islands: the dense mean by other ways, bytes per link to the byte, state that stays with its rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from exchange import crew
from gossamer import exchange as exchange_methods
from gossamer.comm.bucket import Bucket, Layout
from gossamer.comm.channel.counting import CountingChannel
from gossamer.comm.channel.local import LocalChannel, run_lockstep
from gossamer.comm.message import Collective, ExchangeState, Message, Outcome, ProcessGroups, Rounds, Traffic
from gossamer.comm.random_key import Key
from gossamer.exchange import Exchange, ExchangeTraits
from gossamer.exchange.codec import Codec, CodecTraits
from gossamer.exchange.hierarchical import Hierarchical
from gossamer.exchange.islands.island_share import IslandShare, cut
from gossamer.exchange.star import Star, star_pays
from gossamer.spec.errors import BadInput

ISLANDS = {"2+1": (2, 1), "3+2": (3, 2), "2+2": (2, 2), "4x1": (1, 1, 1, 1), "1x4": (4,), "3+1+2": (3, 1, 2)}
each_islands = pytest.mark.parametrize("islands", ISLANDS.values(), ids=ISLANDS)


def levels_of(islands: Sequence[int]) -> ProcessGroups:
    starts = [sum(islands[:k]) for k in range(len(islands))]
    return ProcessGroups.islands([range(s, s + n) for s, n in zip(starts, islands, strict=True)])


def world(
    one: Exchange,
    levels: ProcessGroups,
    where: Layout,
    states: Sequence[ExchangeState] = (),
    step: int = 0,
    weights=None,
    silent: bool = False,
) -> tuple[list[Outcome], list[LocalChannel]]:
    ranks = len(levels.groups["all"][0])
    channels = LocalChannel.world(ranks, levels)
    states = states or [one.init(where)] * ranks
    rounds = [crew.at(r, ranks, step, levels=levels) for r in range(ranks)]
    rounds = [replace(at, weights=weights) for at in rounds] if weights is not None else rounds
    inputs = [where.allocate() if silent else crew.bucket(where, r, step) for r in range(ranks)]
    methods = [one.run(inputs[r], states[r], rounds[r]) for r in range(ranks)]
    return run_lockstep(channels, methods), channels


def dense_mean(where: Layout, ranks: int, step: int = 0) -> torch.Tensor:
    inputs = [crew.bucket(where, r, step).flat.double() for r in range(ranks)]
    return sum(w * x for w, x in zip(crew.weights(ranks), inputs, strict=True)).to(where.dtype)


def kept_mean(where: Layout, outcomes: Sequence[Outcome]) -> torch.Tensor:
    """sum_i w_i kept_i."""
    kept = [crew.kept(crew.bucket(where, r).flat.double(), o) for r, o in enumerate(outcomes)]
    return sum(w * k for w, k in zip(crew.weights(len(outcomes)), kept, strict=True))


@each_islands
@pytest.mark.parametrize(
    "written", ["star", {"star": {"hub": "auto"}}, "recursive_doubling", {"hierarchical": {"inter": "dense"}}]
)
def test_the_mean_is_that_of_dense(written, islands: tuple[int, ...]) -> None:
    where, levels = crew.layout(), levels_of(islands)
    outcomes, _ = world(exchange_methods.build(written), levels, where)
    for outcome in outcomes:
        assert outcome.lost is None
        assert torch.equal(outcome.mean, outcomes[0].mean)
    torch.testing.assert_close(outcomes[0].mean, dense_mean(where, sum(islands)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_a_star_sums_in_rank_order_wherever_its_hub_is(ranks: int) -> None:
    where, levels = crew.layout(), ProcessGroups.flat(ranks)
    wanted = torch.zeros(where.numel)
    for r, share in enumerate(crew.weights(ranks).tolist()):
        wanted.add_(crew.bucket(where, r).flat, alpha=share)
    for hub in ("auto", 0, ranks - 1):
        outcomes, _ = world(Star(hub=hub), levels, where)
        assert all(torch.equal(o.mean, wanted) for o in outcomes)


@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
def test_a_star_loads_its_hub_and_nobody_else(ranks: int) -> None:
    where, levels, hub = crew.layout(), ProcessGroups.flat(ranks), ranks // 2
    _, channels = world(Star(hub="auto"), levels, where)
    for rank, channel in enumerate(channels):
        if rank == hub:
            assert channel.meter.snapshot() == {f"{hub}>{r}": where.nbytes for r in range(ranks) if r != hub}
        else:
            assert channel.meter.snapshot() == {f"{rank}>{hub}": where.nbytes}


def test_a_hub_that_is_not_there_is_refused() -> None:
    one = Star(hub=3)
    one.check(crew.layout(), ProcessGroups.flat(4))
    with pytest.raises(BadInput, match="0 to 2"):
        one.check(crew.layout(), ProcessGroups.flat(3))
    with pytest.raises(BadInput, match=r"star\.hub"):
        exchange_methods.build({"star": {"hub": -1}})


@pytest.mark.parametrize(("ranks", "rounds"), [(1, 1), (2, 1), (3, 3), (4, 2), (5, 4), (6, 4), (8, 3), (9, 5)])
def test_a_tree_takes_log_n_rounds_and_every_rank_sums_in_one_order(ranks: int, rounds: int) -> None:
    where, levels = crew.layout(), ProcessGroups.flat(ranks)
    outcomes, channels = world(exchange_methods.build("recursive_doubling"), levels, where)
    assert {c.meter.messages for c in channels} == {rounds}
    assert all(torch.equal(o.mean, outcomes[0].mean) for o in outcomes)
    assert max(c.meter.total_bytes for c in channels) <= rounds * 4 * where.numel


@pytest.mark.parametrize("codec", [{"cast": {"dtype": "bfloat16"}}, "int8", {"hadamard": "int4"}])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 8, 9])
@pytest.mark.parametrize("silent", [(), (0,), (1,)])
def test_a_coded_tree_accounts_for_what_it_rounds_off(codec, ranks: int, silent: tuple[int, ...]) -> None:
    """All ranks hold the same bits; the mean is that of what was not lost; a rank without weight owes to the mean."""
    one = exchange_methods.build({"recursive_doubling": {"codec": codec}})
    where, levels = crew.layout(), ProcessGroups.flat(ranks)
    weights = crew.weights(ranks).clone()
    weights[[r for r in silent if r < ranks and ranks > 1]] = 0.0
    weights /= weights.sum()
    outcomes, channels = world(one, levels, where, weights=weights)
    assert all(torch.equal(o.mean, outcomes[0].mean) for o in outcomes)
    inputs = [crew.bucket(where, r).flat.double() for r in range(ranks)]
    found, exact = torch.zeros(where.numel, dtype=torch.float64), torch.zeros(where.numel, dtype=torch.float64)
    for x, w, outcome in zip(inputs, weights.tolist(), outcomes, strict=True):
        assert outcome.lost is not None and (outcome.owed is None) == (w > 0)
        exact += w * x
        found += w * (x - outcome.lost.double()) - (0.0 if outcome.owed is None else outcome.owed.double())
    torch.testing.assert_close(outcomes[0].mean.double(), found, rtol=1e-5, atol=2e-6)
    assert not torch.equal(outcomes[0].mean.double(), exact), "something is rounded, of one rank too"
    if "cast" in codec:
        rounds = max(1, ranks.bit_length() + 1)
        torch.testing.assert_close(outcomes[0].mean.double(), exact, rtol=0.0, atol=rounds * 2.0**-8 * 4)
    nbytes = one.codec.nbytes(where.numel)
    for rank, channel in enumerate(channels):
        sent = [t for t in one.traffic(where, levels, rank) if t.nbytes]
        assert channel.meter.total_bytes == nbytes * len(sent)


@pytest.mark.parametrize("codec", [{"int8": {"stochastic": True}}, "lossless", "natural"])
def test_a_tree_takes_no_codec_that_would_part_its_ranks(codec) -> None:
    with pytest.raises(BadInput, match="rounds to nearest"):
        exchange_methods.build({"recursive_doubling": {"codec": codec}})


def test_between_two_ranks_a_coded_tree_takes_half_the_messages_of_two_shots_and_no_more_bytes() -> None:
    where, levels, bf16 = crew.layout(), ProcessGroups.flat(2), {"cast": {"dtype": "bfloat16"}}
    tree, shots = (exchange_methods.build({n: {"codec": bf16}}) for n in ("recursive_doubling", "two_shot"))
    (_, (a, _)), (_, (b, _)) = world(tree, levels, where), world(shots, levels, where)
    assert 2 * a.meter.messages == b.meter.messages and a.meter.total_bytes <= b.meter.total_bytes


@pytest.mark.parametrize("name", ["star", "recursive_doubling", "hierarchical"])
def test_the_sum_does_not_depend_on_who_arrives_first(pool, name: str) -> None:
    """Four processes, each bringing its buckets in an order of its own; twice, and in lockstep: the same bits."""
    answers = [pool.run("exchange.crew:over_gloo", 4, name=name, steps=1, buckets=4) for _ in range(2)]
    assert answers[0] == answers[1]
    assert all(a["means"] == answers[0][0]["means"] for a in answers[0])


def test_a_star_pays_below_the_crossover_and_only_there() -> None:
    """The card's figure: 8 ranks, 1 ms, 1 Gbit/s: about 122 KB. Both sides of it, by the two formulas."""
    link = {"latency_s": 1e-3, "bytes_per_s": 125e6}
    assert star_pays(122_000, 8, **link) and not star_pays(123_000, 8, **link)
    assert not star_pays(1, 2, **link), "two ranks: the same two hops"
    for ranks in (3, 4, 8, 16):
        for nbytes in (100, 10_000, 100_000, 150_000, 10_000_000):
            ring = 2 * (ranks - 1) * 1e-3 + 2 * (ranks - 1) / ranks * nbytes / 125e6
            star = 2e-3 + 2 * (ranks - 1) * nbytes / 125e6
            assert star_pays(nbytes, ranks, **link) == (star < ring)


BETWEEN = {
    "dense": "dense",
    "star": {"star": {"hub": "auto"}},
    "int8": {"two_shot": {"codec": "int8"}},
    "feedback": {"error_feedback": {"topk": {"fraction": 0.1}}},
    "topk": {"topk": {"fraction": 0.1}},
}


@each_islands
@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_islands_agree_and_the_bytes_per_link_are_those_of_the_price(between, islands, dtype) -> None:
    one, where, levels = Hierarchical(exchange_methods.build(between)), crew.layout(dtype=dtype), levels_of(islands)
    states = [one.init(where)] * sum(islands)
    for step in range(2):
        outcomes, channels = world(one, levels, where, states, step)
        states = [o.state for o in outcomes]
        assert all(torch.equal(o.mean, outcomes[0].mean) for o in outcomes)
        for rank, channel in enumerate(channels):
            priced = CountingChannel(rank, levels)
            priced.charge(one.traffic(where, levels, rank))
            assert channel.meter.snapshot() == priced.meter.snapshot()
            assert channel.meter.messages == priced.meter.messages == channels[0].meter.messages


@each_islands
def test_only_owners_talk_to_other_islands(islands: tuple[int, ...]) -> None:
    """Counted by hand: inside, every rank sends what others own and every owner its mean; between, owners alone."""
    where, levels, one = crew.layout(), levels_of(islands), Hierarchical(exchange_methods.build("dense"))
    _, channels = world(one, levels, where)
    owners = min(islands)
    sizes = [run.numel * 4 for run in cut(where, owners)]
    for rank, channel in enumerate(channels):
        island = levels.group("island", rank)
        me = island.index(rank)
        sent = channel.meter.snapshot()
        for k, peer in enumerate(island):
            if peer != rank:
                to_owner = sizes[k] if k < owners else 0
                back = sizes[me] if me < owners else 0
                assert sent.get(f"{rank}>{peer}", 0) == to_owner + back
        abroad = {link for link in sent if int(link.partition(">")[2]) not in island}
        assert len(abroad) == (1 if me < owners and len(islands) > 1 else 0), "a ring goes to one neighbor"


@each_islands
@pytest.mark.parametrize("between", ["int8", "topk"])
def test_what_is_lost_between_islands_is_said_to_whoever_asks(between: str, islands: tuple[int, ...]) -> None:
    """mean = sum_i w_i kept_i, so feedback around the whole would find it."""
    one, where, levels = Hierarchical(exchange_methods.build(BETWEEN[between])), crew.layout(), levels_of(islands)
    outcomes, _ = world(one, levels, where)
    kept = kept_mean(where, outcomes)
    torch.testing.assert_close(outcomes[0].mean.double(), kept, rtol=1e-5, atol=1e-6)


@each_islands
@pytest.mark.parametrize("between", ["dense", "int8", "feedback"])
def test_a_codec_inside_islands_leaves_all_ranks_with_one_mean(between: str, islands: tuple[int, ...]) -> None:
    one = exchange_methods.build(
        {"hierarchical": {"inter": BETWEEN[between], "intra_codec": {"int8": {"stochastic": True}}}}
    )
    where, levels = crew.layout(), levels_of(islands)
    outcomes, _ = world(one, levels, where)
    assert all(torch.equal(o.mean, outcomes[0].mean) for o in outcomes)
    if between != "feedback":  # which owes some of it
        kept = kept_mean(where, outcomes)
        torch.testing.assert_close(outcomes[0].mean.double(), kept, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(outcomes[0].mean, dense_mean(where, sum(islands)), rtol=0.1, atol=0.1)


@each_islands
def test_feedback_between_islands_sends_everything_in_time(islands: tuple[int, ...]) -> None:
    """Telescoping: with nothing new to send, the residuals come out, and the means add up to those of dense."""
    one, where, levels = Hierarchical(exchange_methods.build(BETWEEN["feedback"])), crew.layout(), levels_of(islands)
    ranks, total, wanted = sum(islands), torch.zeros(where.numel), torch.zeros(where.numel)
    states = [one.init(where)] * ranks
    for step in range(18):
        outcomes, _ = world(one, levels, where, states, step, silent=step >= 4)
        states = [o.state for o in outcomes]
        total += outcomes[0].mean
        wanted += dense_mean(where, ranks, step) if step < 4 else 0.0
        for rank, state in enumerate(states):
            owned = IslandShare.of(where, levels, rank).mine
            owed = dict(state.flatten())["0/e"]
            assert owed.shape == (where.numel,), "kept by parameter name in checkpoints"
            assert not owed[: owned.start].any() and not owed[owned.stop :].any(), "nobody owes what another one owns"
            assert step >= 4 or bool(owed.any()) == (owned.numel > 0)
    torch.testing.assert_close(total, wanted, rtol=1e-5, atol=1e-5)


def test_an_island_without_weight_does_not_count() -> None:
    where, levels = crew.layout(), levels_of((2, 2))
    weights = torch.tensor([0.25, 0.75, 0.0, 0.0], dtype=torch.float64)
    wanted = 0.25 * crew.bucket(where, 0).flat + 0.75 * crew.bucket(where, 1).flat
    outcomes, _ = world(Hierarchical(exchange_methods.build("dense")), levels, where, weights=weights)
    torch.testing.assert_close(outcomes[3].mean, wanted)
    lossy, _ = world(Hierarchical(exchange_methods.build(BETWEEN["int8"])), levels, where, weights=weights)
    assert all(bool(torch.isfinite(o.lost).all()) for o in lossy)


@dataclass(frozen=True)
class PerMatrix(Exchange):
    """A round for every matrix and one for the rest, and state of its own shape: as low-rank methods have."""

    traits = ExchangeTraits(lossless=True)

    def init(self, layout: Layout) -> ExchangeState:
        return ExchangeState({f"q@{e.name}": torch.zeros(e.shape[:1]) for e in layout.entries if len(e.shape) == 2})

    def run(self, x: Bucket, state: ExchangeState, at) -> Rounds:
        found = dict(state.tensors)
        for name, part in x.slices():
            if part.dim() == 2:
                found[f"q@{name}"] = found[f"q@{name}"] + 1
                yield Message((part.sum().reshape(1),), Collective.SUM)
        (mean,) = yield Message((x.flat * at.share,), Collective.SUM)
        return Outcome(mean, None, ExchangeState(found))

    def traffic(self, layout: Layout, levels: ProcessGroups, rank: int) -> tuple[Traffic, ...]:
        matrices = sum(len(e.shape) == 2 for e in layout.entries)
        return (Traffic(Collective.SUM, 1, 4),) * matrices + (Traffic(Collective.SUM, layout.numel, 4),)


@each_islands
def test_owners_of_other_entries_may_need_other_rounds_and_state(islands: tuple[int, ...]) -> None:
    """All ranks send as many messages: the pump's order is the same everywhere."""
    shapes = {"a": (40, 10), "b": (20, 20), "bias": (400,), "c": (30,)}
    one, where, levels = Hierarchical(PerMatrix()), crew.layout(shapes), levels_of(islands)
    outcomes, channels = world(one, levels, where)
    torch.testing.assert_close(outcomes[0].mean, dense_mean(where, sum(islands)), rtol=1e-5, atol=1e-6)
    assert len({c.meter.messages for c in channels}) == 1
    for rank, outcome in enumerate(outcomes):
        owned = {e.name for e in IslandShare.of(where, levels, rank).mine.layout.entries}
        counted = {path.partition("@")[2]: float(t[0]) for path, t in outcome.state.flatten()}
        assert counted == {name: float(name in owned) for name in ("a", "b")}


def test_entries_stay_whole_and_owners_get_about_as_much() -> None:
    where = crew.layout({f"layer{i}": (100 + i,) for i in range(40)})
    runs = cut(where, 4)
    assert [r.start for r in runs[1:]] == [r.stop for r in runs[:-1]] and runs[-1].stop == where.numel
    assert [e.name for r in runs for e in r.layout.entries] == [e.name for e in where.entries]
    assert all(r.layout.entries[0].start == 0 and r.layout.numel == r.numel for r in runs)
    assert max(r.numel for r in runs) < where.numel / 4 + 139
    few = cut(crew.layout({"one": (8,)}), 3)
    assert sorted(r.numel for r in few) == [0, 0, 8]


def test_without_islands_it_says_what_is_missing() -> None:
    one = exchange_methods.build({"hierarchical": {"inter": "dense"}})
    with pytest.raises(BadInput, match="islands of ranks"):
        one.check(crew.layout(), ProcessGroups.flat(4))
    with pytest.raises(BadInput, match="islands of ranks"):
        Hierarchical(one).check(crew.layout(), levels_of((2, 2)))
    one.check(crew.layout(), levels_of((3, 2)))


@dataclass(frozen=True)
class Growing(Codec):
    """A codec whose messages are as long as they need to be."""

    traits = CodecTraits(fixed_size=False)

    def nbytes(self, numel: int) -> int:
        return 4 * numel

    def encode(self, x: torch.Tensor, key: Key) -> torch.Tensor:
        return x.view(torch.uint8)

    def decode(self, message: torch.Tensor, numel: int, key: Key) -> torch.Tensor:
        return message.view(torch.float32).clone()


def test_a_codec_of_no_fixed_size_is_refused_inside() -> None:
    with pytest.raises(BadInput, match="fixed size"):
        Hierarchical(exchange_methods.build("dense"), intra_codec=Growing())
