"""What every exchange must do, in lockstep and over gloo: agree, count, lose nothing unsaid, never touch its state."""

from __future__ import annotations

from dataclasses import MISSING, fields, replace
from typing import Any

import pytest
import torch

from exchange import crew
from gossamer import exchange as exchange_methods
from gossamer.comm.bucket import Bucket, Layout
from gossamer.comm.channel.counting import CountingChannel
from gossamer.comm.channel.local import LocalChannel, run_lockstep
from gossamer.comm.channel.loopback import LoopbackChannel
from gossamer.comm.message import Collective, ExchangeContext, ExchangeState
from gossamer.spec.errors import BadInput

NAMES = (*exchange_methods.names(), *crew.NESTED)
each = pytest.mark.parametrize("name", NAMES)
SIZES = {
    "empty": {"e": (0,)},
    "scalar": {"s": ()},
    "one": {"o": (1,)},
    "odd": {"a": (7,), "b": (3, 5), "c": (1, 1)},
    "mixed": crew.SHAPES,
}


def flat_state(state: ExchangeState) -> dict[str, torch.Tensor]:
    return {path: tensor.clone() for path, tensor in state.flatten()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@each
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("shapes", SIZES)
def test_all_ranks_get_one_mean_and_the_bytes_are_those_of_the_price(name: str, ranks: int, shapes: str) -> None:
    one, where = crew.example(name), crew.layout(SIZES[shapes])
    states = [one.init(where) for _ in range(ranks)]
    for step in range(3):
        outcomes, channels = crew.world(one, ranks, [crew.bucket(where, r, step) for r in range(ranks)], states, step)
        states = [o.state for o in outcomes]
        for outcome in outcomes:
            assert outcome.mean.shape == (where.numel,) and outcome.mean.dtype == where.dtype
            assert torch.equal(outcome.mean, outcomes[0].mean), "the ranks hold different means"
        for rank, channel in enumerate(channels):
            priced = CountingChannel(rank, channel.levels)
            priced.charge(one.traffic(where, channel.levels, rank))
            assert channel.meter.messages == priced.meter.messages
            counted, price = channel.meter.snapshot(), priced.meter.snapshot()
            if one.traits.fixed_size:
                assert counted == price
            else:
                assert all(counted[link] <= price.get(link, 0) for link in counted)


@each
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_mean_is_what_was_kept(name: str, ranks: int) -> None:
    """mean = sum_i w_i kept_i; with nothing lost, the weighted mean itself."""
    one, where = crew.example(name), crew.layout()
    inputs = [crew.bucket(where, r) for r in range(ranks)]
    given = [x.flat.clone() for x in inputs]
    outcomes, _ = crew.world(one, ranks, inputs, [one.init(where) for _ in range(ranks)])
    shares = crew.weights(ranks)
    if outcomes[0].lost is None and not one.traits.lossless:
        pytest.skip("remembers what it did not send")
    assert all(o.lost is None or (o.lost.shape == (where.numel,) and o.lost.dtype == torch.float32) for o in outcomes)
    wanted = sum(shares[r] * crew.kept(given[r].double(), outcomes[r]) for r in range(ranks))
    torch.testing.assert_close(outcomes[0].mean.double(), wanted, rtol=1e-5, atol=1e-6)


@each
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_whether_somebody_asks_what_is_lost_changes_nothing_else(name: str, ranks: int) -> None:
    one, where, levels = crew.example(name), crew.layout(), crew.levels_of(ranks)
    found = []
    for accounts in (True, False):
        rounds = [replace(crew.at(r, ranks, levels=levels), accounts=accounts) for r in range(ranks)]
        methods = [one.run(crew.bucket(where, at.rank), one.init(where), at) for at in rounds]
        found.append(run_lockstep(LocalChannel.world(ranks, levels), methods))
    for asked, unasked in zip(*found, strict=True):
        assert torch.equal(asked.mean, unasked.mean) and same(flat_state(asked.state), flat_state(unasked.state))


@each
def test_state_is_handed_back_and_never_changed(name: str) -> None:
    """Also when the exchange is closed in the middle, at every one of its rounds."""
    one, where, ranks = crew.example(name), crew.layout(), 2
    states = [crew.steps_in_lockstep(one, ranks, 2, where)[-1][r].state for r in range(ranks)]
    before = [flat_state(s) for s in states]
    _, channels = crew.world(one, ranks, [crew.bucket(where, r, 9) for r in range(ranks)], states, 9)
    assert [same(flat_state(s), b) for s, b in zip(states, before, strict=True)] == [True] * ranks
    rounds = len(one.traffic(where, channels[0].levels, 0))
    for stop in range(rounds):
        channel = LoopbackChannel(0, channels[0].levels)
        method = one.run(crew.bucket(where, 0, 9), states[0], crew.at(0, ranks, 9))
        message = next(method)
        for _ in range(stop):
            message = method.send(channel.start(message).wait())
        method.close()
        assert same(flat_state(states[0]), before[0])


@pytest.mark.parametrize("name", exchange_methods.names())
def test_the_exchanges_in_it_are_in_the_order_of_their_states(name: str) -> None:
    """By whose numbers what a rank owns of a state is found."""
    stateful = iter([{"delta_reference": "dense"}, {"momentum": "dense"}])
    kind = exchange_methods.REGISTRY.type(name)
    inner = {f.name: next(stateful) for f in fields(kind) if f.type == "Exchange"}
    given = {f.name: "int8" for f in fields(kind) if f.type == "Codec" and f.default is MISSING}
    one = exchange_methods.build({name: {**given, **inner}} if inner or given else name)
    states = one.init(crew.layout()).inner
    assert len(states) == len(one.parts) >= len(inner)
    for state, part in zip(states, one.parts, strict=True):
        assert [path for path, _ in state.flatten()] == [path for path, _ in part.init(crew.layout()).flatten()]


@each
def test_saved_and_restored_goes_on_the_same(name: str) -> None:
    one, where, ranks = crew.example(name), crew.layout(), 2
    whole = crew.steps_in_lockstep(one, ranks, 4, where)
    saved = [flat_state(o.state) for o in whole[1]]
    states = [one.init(where).replace(s) for s in saved]
    for step in (2, 3):
        outcomes, _ = crew.world(one, ranks, [crew.bucket(where, r, step) for r in range(ranks)], states, step)
        states = [o.state for o in outcomes]
        assert torch.equal(outcomes[0].mean, whole[step][0].mean)
    assert all(same(flat_state(s), flat_state(o.state)) for s, o in zip(states, whole[3], strict=True))


@each
def test_the_first_state_is_the_same_on_every_rank(name: str) -> None:
    one, where = crew.example(name), crew.layout()
    assert same(flat_state(one.init(where)), flat_state(one.init(where)))


@each
def test_all_ranks_get_one_mean_after_a_step_inside_islands_too(name: str) -> None:
    """Unless the exchange says that it needs the same ranks: what it knows is then other on every island."""
    one, where = crew.example(name), crew.layout()
    levels = crew.levels_of(4)
    states = [one.init(where)] * 4
    for step in range(3):
        method, among = (one.for_island(), levels.only("island")) if step == 1 else (one, levels)
        weights = torch.full((4,), 0.5 if step == 1 else 0.25, dtype=torch.float64)
        rounds = [
            method.run(
                crew.bucket(where, rank, step),
                state if method is one else method.init(where),
                ExchangeContext(rank, among, weights, (11, step), 0.1),
            )
            for rank, state in enumerate(states)
        ]
        outcomes = run_lockstep(LocalChannel.world(4, levels if step != 1 else among), rounds)
        states = [o.state for o in outcomes] if method is one else states
    agree = all(torch.equal(outcome.mean, outcomes[0].mean) for outcome in outcomes)
    assert agree != any(inner.needs_same_ranks for inner in exchange_methods.nested(one.for_island()))


@each
def test_half_precision_buckets_are_served(name: str) -> None:
    one, where = crew.example(name), crew.layout(dtype=torch.bfloat16)
    outcomes, channels = crew.world(one, 2, [crew.bucket(where, r) for r in range(2)], [one.init(where)] * 2)
    assert outcomes[0].mean.dtype == torch.bfloat16 and bool(torch.isfinite(outcomes[0].mean).all())
    priced = CountingChannel(0, channels[0].levels)
    priced.charge(one.traffic(where, channels[0].levels, 0))
    if one.traits.fixed_size:
        assert priced.meter.snapshot() == channels[0].meter.snapshot()


@each
def test_double_precision_buckets_are_served(name: str) -> None:
    """Without loss means in double precision: models in float64 are not rounded to float32 on the way."""
    one, where = crew.example(name), crew.layout(dtype=torch.float64)
    given = [crew.bucket(where, r) for r in range(2)]
    exact = sum(share * b.flat for share, b in zip(crew.weights(2), given, strict=True))
    outcomes, channels = crew.world(one, 2, given, [one.init(where)] * 2)
    assert outcomes[0].mean.dtype == torch.float64 and torch.equal(outcomes[0].mean, outcomes[1].mean)
    if one.traits.lossless:
        torch.testing.assert_close(outcomes[0].mean, exact, rtol=1e-13, atol=1e-13)
    priced = CountingChannel(0, channels[0].levels)
    priced.charge(one.traffic(where, channels[0].levels, 0))
    if one.traits.fixed_size:
        assert priced.meter.snapshot() == channels[0].meter.snapshot()


DENSE: list[Any] = [{"error_feedback": "dense"}, {"momentum": "dense"}, {"delta_reference": "dense"}]


@pytest.mark.parametrize("written", [*DENSE, {"momentum": DENSE[0]}, {"warmup": {"inner": DENSE[2]}}], ids=str)
def test_around_an_exchange_without_loss_double_precision_stays(written: Any) -> None:
    """Also of numbers for which float32 has no room, in every step."""
    one, where = exchange_methods.build(written), crew.layout({"w": (3,)}, dtype=torch.float64)
    assert one.traits.lossless
    states = [one.init(where)] * 2
    for step in range(3):
        given = [torch.tensor([1 / 3, 1e-50, 1 + 2.0**-40], dtype=torch.float64) * (1 + r + step) for r in range(2)]
        exact = sum(share * x for share, x in zip(crew.weights(2), given, strict=True))
        outcomes, channels = crew.world(one, 2, [Bucket(where, x.clone()) for x in given], states, step)
        states = [o.state for o in outcomes]
        assert all(tensor.dtype is torch.float32 for state in states for _, tensor in state.flatten())
        for outcome in outcomes:
            torch.testing.assert_close(outcome.mean, exact, rtol=1e-13, atol=0.0)
        priced = CountingChannel(0, channels[0].levels)
        priced.charge(one.traffic(where, channels[0].levels, 0))
        assert priced.meter.snapshot() == channels[0].meter.snapshot()


@pytest.mark.parametrize("codec", ["float32", "lossless"])
@pytest.mark.parametrize("around", ["two_shot", "all_gather", "error_feedback", "intra_codec"])
def test_a_codec_that_would_round_double_precision_in_silence_is_refused(codec: str, around: str) -> None:
    written: dict[str, Any] = {
        "two_shot": {"two_shot": {"codec": codec}},
        "all_gather": {"all_gather": {"codec": codec}},
        "error_feedback": {"error_feedback": {"two_shot": {"codec": codec}}},
        "intra_codec": {"hierarchical": {"inter": "dense", "intra_codec": "float32"}},
    }[around]
    one = exchange_methods.build(written)
    one.check(crew.layout(), crew.levels_of(4))
    with pytest.raises(BadInput, match=r"wanted numbers of at most 32 bits.*got w and others in float64"):
        one.check(crew.layout(dtype=torch.float64), crew.levels_of(4))


@each
def test_a_rank_without_weight_does_not_count(name: str) -> None:
    """A rank whose sequences hold no label has a share of zero, and zero gradients."""
    one, where, levels = crew.example(name), crew.layout(), crew.levels_of(2)
    inputs = [crew.bucket(where, 0), Bucket(where, torch.zeros(where.numel))]
    alone = torch.tensor([1.0, 0.0], dtype=torch.float64)
    rounds = [replace(crew.at(r, 2, levels=levels), weights=alone) for r in range(2)]
    given = inputs[0].flat.clone()
    methods = [one.run(x, one.init(where), r) for x, r in zip(inputs, rounds, strict=True)]
    outcomes = run_lockstep(LocalChannel.world(2, levels), methods)
    assert bool(torch.isfinite(outcomes[0].mean).all())
    if one.traits.lossless:
        torch.testing.assert_close(outcomes[0].mean, given)


@each
@pytest.mark.parametrize("ranks", [2, 3])
def test_gloo_gives_what_lockstep_gives(pool, name: str, ranks: int) -> None:
    """Bit for bit, with buckets arriving in random order; where the backend sums three ranks, to 1e-6."""
    steps, buckets = 2, 3
    one, where = crew.example(name), crew.layout()
    answers = pool.run("exchange.crew:over_gloo", ranks, name=name, steps=steps, buckets=buckets)
    states = [[one.init(where) for _ in range(ranks)] for _ in range(buckets)]
    means, sent = [], [dict[str, int]() for _ in range(ranks)]
    for step in range(steps):
        for b in range(buckets):
            inputs = [crew.bucket(where, r, step * buckets + b) for r in range(ranks)]
            outcomes, channels = crew.world(one, ranks, inputs, states[b], step)
            states[b] = [o.state for o in outcomes]
            means.append(outcomes[0].mean)
            for rank, channel in enumerate(channels):
                for link, count in channel.meter.snapshot().items():
                    sent[rank][link] = sent[rank].get(link, 0) + count
    backend_sums = any(t.combine is Collective.SUM for t in one.traffic(where, crew.levels_of(ranks), 0))
    exact = ranks == 2 or not backend_sums
    for rank, answer in enumerate(answers):
        for mine, wanted in zip(answer["means"], means, strict=True):
            got = torch.tensor(mine, dtype=wanted.dtype)
            if exact:
                assert torch.equal(got, wanted)
            else:
                torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
        assert answer["sent"] == sent[rank]
        if exact:
            for b in range(buckets):
                wanted_state = {k: t.flatten().tolist() for k, t in states[b][rank].flatten()}
                assert answer["states"][b] == wanted_state


@each
def test_a_wire_it_cannot_serve_is_refused_with_a_reason(name: str) -> None:
    """Either it serves one flat level without islands, or it says why not before anything is sent."""
    from gossamer.comm.message import ProcessGroups

    one, where, levels = crew.example(name), crew.layout(), ProcessGroups.flat(2)
    try:
        one.check(where, levels)
    except BadInput as error:
        assert len(error.message) > 20
        return
    assert one.traffic(where, levels, 0)


@each
@pytest.mark.parametrize("occupied", [0.1, 1.0])
def test_what_is_expected_of_a_bucket_is_within_what_is_declared(name: str, occupied: float) -> None:
    """As many messages, none longer, and where all of the bucket is in use the same."""
    one, where, levels = crew.example(name), crew.layout(), crew.levels_of(4)
    declared, expected = one.traffic(where, levels, 0), one.expected_traffic(where, levels, 0, occupied)
    assert expected == declared if occupied == 1.0 or one.traits.fixed_size else len(expected) == len(declared)
    assert all(
        e.nbytes <= d.nbytes and replace(e, elements=d.elements) == d for e, d in zip(expected, declared, strict=True)
    )


def test_a_layout_of_nothing_is_a_layout() -> None:
    where = Layout((), torch.float32)
    assert where.numel == 0 and where.allocate().flat.numel() == 0
