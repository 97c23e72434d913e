"""Low rank: what Power-SGD, ACP-SGD and a warm-up before them must hold besides the contract of every exchange."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from exchange import crew
from gossamer.comm.bucket import Bucket
from gossamer.comm.channel.counting import CountingChannel
from gossamer.comm.message import ExchangeState, ProcessGroups
from gossamer.exchange import Exchange
from gossamer.exchange._low_rank import _multiply, split
from gossamer.exchange.acp_sgd import AcpSgd
from gossamer.exchange.codec import Codec
from gossamer.exchange.codec.int8 import Int8
from gossamer.exchange.codec.sign import Sign
from gossamer.exchange.dense import Dense
from gossamer.exchange.econtrol import EControl
from gossamer.exchange.error_feedback import ErrorFeedback
from gossamer.exchange.hierarchical import Hierarchical
from gossamer.exchange.powersgd import PowerSgd
from gossamer.exchange.topk import TopK
from gossamer.exchange.two_shot import TwoShot
from gossamer.exchange.warmup import Warmup
from gossamer.ops.orthogonalize import orthonormal
from gossamer.spec.errors import BadInput

both = pytest.mark.parametrize("one", [PowerSgd(rank=3), AcpSgd(rank=3)], ids=lambda one: type(one).__name__)
CODED = {
    "powersgd": PowerSgd(rank=3),
    "powersgd in 8 bits": PowerSgd(rank=3, p_exchange=TwoShot(Int8()), q_exchange=TwoShot(Int8())),
    "acp_sgd": AcpSgd(rank=3),
    "acp_sgd in 8 bits": AcpSgd(rank=3, factor_exchange=TwoShot(Int8())),
}
RANKS = 3


def weighted(inputs: list[Bucket]) -> torch.Tensor:
    shares = crew.weights(len(inputs))
    return sum(shares[r] * x.flat.double() for r, x in enumerate(inputs))


def steps(one: Exchange, where, count: int, draw):
    """Outcomes [step][rank] and inputs; `draw(rank, step)` gives a rank's flat input."""
    states, found, given = [one.init(where)] * RANKS, [], []
    for step in range(count):
        inputs = [Bucket(where, draw(r, step)) for r in range(RANKS)]
        given.append(weighted(inputs))
        outcomes, _ = crew.world(one, RANKS, inputs, states, step)
        states = [o.state for o in outcomes]
        found.append(outcomes)
    return found, given


@pytest.mark.parametrize("one", CODED.values(), ids=CODED)
def test_feedback_sends_everything_in_time(one: Exchange) -> None:
    """Telescoping: what was sent and what is still owed make up what was to be sent."""
    where = crew.layout()
    found, given = steps(ErrorFeedback(one, track_lr=False), where, 7, lambda r, s: crew.bucket(where, r, s).flat)
    sent = sum(outcomes[0].mean.double() for outcomes in found)
    owed = sum(outcome.state.tensors["e"].double() for outcome in found[-1])  # weighted as it is
    wanted = sum(given)
    assert torch.linalg.norm(sent + owed - wanted) <= 1e-6 * torch.linalg.norm(wanted)
    assert torch.linalg.norm(owed) > 0.1 * torch.linalg.norm(wanted)  # something was owed


@both
def test_it_is_linear(one: Exchange) -> None:
    """The ranks' mean is what one rank would get that had the mean input: sums of payloads are payloads of sums."""
    where = crew.layout()
    found, given = steps(one, where, 4, lambda r, s: crew.bucket(where, r, s).flat)
    state = one.init(where)
    for outcomes, x in zip(found, given, strict=True):
        (alone,), _ = crew.world(one, 1, [Bucket(where, x.float())], [state])
        state = alone.state
        torch.testing.assert_close(alone.mean, outcomes[0].mean, rtol=1e-4, atol=1e-5)


def test_a_left_factor_in_eight_bits_spans_nearly_the_same_space_and_loses_nothing_besides() -> None:
    """What is kept is a projection of what was given, whatever space the rounded factor spans."""
    where, coded = crew.layout({"w": (300, 40)}), PowerSgd(rank=3, p_exchange=TwoShot(Int8()))
    rng = torch.Generator().manual_seed(5)
    strong = torch.randn(300, 3, generator=rng) @ torch.randn(3, 40, generator=rng)
    drawn = [strong.flatten() + 0.1 * crew.bucket(where, r).flat for r in range(RANKS)]
    plain, _ = steps(PowerSgd(rank=3), where, 4, lambda r, s: drawn[r].clone())
    found, given = steps(coded, where, 4, lambda r, s: drawn[r].clone())
    for few, many, wanted in zip(found, plain, given, strict=True):
        missed, least = (torch.linalg.norm(o[0].mean.double() - wanted) for o in (few, many))
        assert missed < 1.05 * least
        for o, x in zip(few, drawn, strict=True):
            kept = (x - o.lost).view(300, 40).double()
            assert abs(float((kept * o.lost.view(300, 40)).sum())) < 1e-4 * float(torch.linalg.norm(kept)) ** 2
    layout, levels = crew.layout({"w": (8192, 384), "b": (384,)}), ProcessGroups.flat(2)
    prices = [CountingChannel(0, levels) for _ in range(2)]
    for price, left in zip(prices, (Dense(), TwoShot(Int8())), strict=True):
        price.charge(PowerSgd(16, left).traffic(layout, levels, 0))
    assert 3.4 * prices[1].meter.total_bytes < prices[0].meter.total_bytes


@pytest.mark.parametrize("codec", [Sign(), Int8()], ids=lambda one: type(one).__name__)
@both
def test_a_coded_factor_counts_as_it_arrives(one: Exchange, codec: Codec) -> None:
    """The mean is one factor times what all ranks decode of the other; what a rank has lost is the rest of its own."""
    key = "q_exchange" if isinstance(one, PowerSgd) else "factor_exchange"
    where, coded = crew.layout({"w": (300, 40)}), replace(one, **{key: TwoShot(codec)})
    found, given = steps(coded, where, 4, lambda r, s: crew.bucket(where, r, s).flat)
    plain, _ = steps(one, where, 4, lambda r, s: crew.bucket(where, r, s).flat)
    shares = crew.weights(RANKS)
    for step, (outcomes, wanted) in enumerate(zip(found, given, strict=True)):
        assert torch.linalg.matrix_rank(outcomes[0].mean.view(300, 40)) <= 3
        kept = wanted - sum(shares[r] * o.lost.double() for r, o in enumerate(outcomes))
        assert torch.linalg.norm(kept - outcomes[0].mean) <= 1e-5 * torch.linalg.norm(kept)
        assert not torch.equal(outcomes[0].mean, plain[step][0].mean)


def test_both_factors_in_eight_bits_send_a_fourth() -> None:
    shapes = {"qkv": (1152, 384), "up": (1536, 384), "down": (384, 1536), "b": (384,)}
    layout, levels = crew.layout(shapes), ProcessGroups.flat(2)
    sent = []
    for left, right in ((Dense(), Dense()), (TwoShot(Int8()), Dense()), (TwoShot(Int8()), TwoShot(Int8()))):
        price = CountingChannel(0, levels)
        price.charge(PowerSgd(16, left, right).traffic(layout, levels, 0))
        sent.append(price.meter.total_bytes)
    factors = 16 * sum(rows + cols for rows, cols in list(shapes.values())[:3]) + 384  # two ranks: each number once
    assert sent[0] == 4 * factors
    assert sent[1] > 0.5 * sent[0]
    assert factors <= sent[2] <= 1.02 * factors


def test_feedback_inside_a_factor_is_refused() -> None:
    with pytest.raises(BadInput, match="wanted an exchange without error feedback for the low-rank factor P"):
        PowerSgd(p_exchange=ErrorFeedback(TwoShot(Int8())))
    with pytest.raises(BadInput, match="wanted an exchange without error feedback for the low-rank factor Q"):
        PowerSgd(q_exchange=ErrorFeedback(TwoShot(Int8())))
    with pytest.raises(BadInput, match="wanted an exchange without error feedback for the low-rank factors"):
        AcpSgd(factor_exchange=ErrorFeedback(TwoShot(Int8())))


@both
def test_a_matrix_of_low_rank_arrives_whole_from_the_second_step_on(one: Exchange) -> None:
    rng = torch.Generator().manual_seed(3)
    matrix = torch.randn(24, 2, generator=rng) @ torch.randn(2, 40, generator=rng)
    where = crew.layout({"w": (24, 40)})
    found, _ = steps(one, where, 3, lambda r, s: matrix.flatten().clone())
    for outcomes in found[1:]:
        torch.testing.assert_close(outcomes[0].mean.view(24, 40), matrix, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("shape", "exact"), [((24, 4), 0), ((4, 24), 1)])
def test_acp_is_exact_whenever_the_factor_it_sends_is_the_matrix(shape: tuple[int, int], exact: int) -> None:
    """r >= n2: where left factors are sent; r >= n1: where right ones are."""
    where = crew.layout({"w": shape})
    found, given = steps(AcpSgd(rank=4), where, 6, lambda r, s: crew.bucket(where, r, s).flat)
    for step, (outcomes, wanted) in enumerate(zip(found, given, strict=True)):
        error = torch.linalg.norm(outcomes[0].mean.double() - wanted) / torch.linalg.norm(wanted)
        assert error < 1e-6 if step % 2 == exact else error > 0.1


@pytest.mark.parametrize("one", [PowerSgd(rank=9), AcpSgd(rank=9)])
def test_full_rank_is_dense(one: Exchange) -> None:
    where = crew.layout({"w": (9, 9), "b": (9,)})
    assert one.contraction(where) == 1.0
    found, given = steps(one, where, 2, lambda r, s: crew.bucket(where, r, s).flat)
    for outcomes, wanted in zip(found, given, strict=True):
        torch.testing.assert_close(outcomes[0].mean.double(), wanted, rtol=1e-6, atol=1e-6)
    assert one.contraction(crew.layout()) is None


HARD = {
    "gaussian": lambda rng: torch.randn(24, 40, generator=rng),
    "zero": lambda rng: torch.zeros(24, 40),
    "one row": lambda rng: torch.zeros(24, 40).index_fill_(0, torch.tensor([5]), 2.0),
    "rank one": lambda rng: torch.outer(torch.randn(24, generator=rng), torch.randn(40, generator=rng)),
    "tiny": lambda rng: 1e-38 * torch.randn(24, 40, generator=rng),
    "denormal": lambda rng: 1e-42 * torch.randn(24, 40, generator=rng),
    "huge": lambda rng: 1e30 * torch.randn(24, 40, generator=rng),
}


@both
@pytest.mark.parametrize("kind", HARD)
def test_factors_are_finite_and_the_same_on_all_ranks_at_every_step(one: Exchange, kind: str) -> None:
    where = crew.layout({"w": (24, 40)})

    def draw(rank: int, step: int) -> torch.Tensor:
        hard = HARD[kind if step in (1, 2) else "gaussian"]
        return hard(torch.Generator().manual_seed(100 * step + rank)).flatten()

    found, given = steps(one, where, 5, draw)
    for outcomes in found:
        states = [dict(o.state.flatten()) for o in outcomes]
        for name, tensor in states[0].items():
            assert bool(torch.isfinite(tensor).all())
            assert all(torch.equal(tensor, other[name]) for other in states)
            if isinstance(one, AcpSgd) and tensor.dim():
                torch.testing.assert_close(tensor @ tensor.T, torch.eye(3), rtol=0, atol=1e-5)
        assert all(bool(torch.isfinite(o.mean).all() and torch.isfinite(o.lost).all()) for o in outcomes)
    for outcomes, wanted in zip(found[3:], given[3:], strict=True):  # it sees again what there is to see
        assert torch.linalg.norm(outcomes[0].mean) > 0.1 * torch.linalg.norm(wanted)


def test_a_step_of_zeros_forgets_nothing() -> None:
    where = crew.layout({"w": (24, 40)})
    for one in (PowerSgd(rank=3), AcpSgd(rank=3)):
        before = crew.steps_in_lockstep(one, RANKS, 2, where)[-1][0].state
        zeros = [where.allocate() for _ in range(RANKS)]
        outcomes, _ = crew.world(one, RANKS, zeros, [before] * RANKS)
        after = outcomes[0].state
        for name, old in before.tensors.items():
            if old.dim():  # the same space, as seen by its projection
                new = after.tensors[name]
                projections = [f.T @ torch.linalg.pinv(f.T) for f in (old, new)]
                torch.testing.assert_close(projections[0], projections[1], rtol=0, atol=1e-4)


@both
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_hidden(one: Exchange, bad: float) -> None:
    where = crew.layout({"w": (24, 40)})
    inputs = [crew.bucket(where, r) for r in range(RANKS)]
    inputs[1].flat[77] = bad
    outcomes, _ = crew.world(one, RANKS, inputs, [one.init(where)] * RANKS)
    assert not any(bool(torch.isfinite(o.mean).all()) for o in outcomes)


def test_orthonormal_rows_whatever_they_were() -> None:
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(5, 4, 33, generator=rng)
    x[0], x[1, 2], x[2, 3] = 0, 0, x[2, 1]
    x[3, 0] = 1e-7 * x[3, 0] + x[3, 1]
    q = orthonormal(x)
    torch.testing.assert_close(q @ q.mT, torch.eye(4).expand(5, 4, 4), rtol=0, atol=1e-5)
    back = x[4] @ q[4].T @ q[4]
    torch.testing.assert_close(back, x[4], rtol=1e-4, atol=1e-5)  # the same space
    assert q.is_contiguous()


def sent_by(one: Exchange, where, state: ExchangeState, step: int, ranks: int = 4) -> tuple[int, ExchangeState]:
    outcomes, channels = crew.world(
        one, ranks, [crew.bucket(where, r, step) for r in range(ranks)], [state] * ranks, step
    )
    return channels[0].meter.total_bytes, outcomes[0].state


@pytest.mark.parametrize(("rank", "r"), [(4, 4), (100, 16)])
def test_bytes_are_those_of_the_factors(rank: int, r: int) -> None:
    """2 (n-1)/n 4 r (n1 + n2) for Power-SGD, n1 and n2 in turn for ACP-SGD; r is clipped to min(n1, n2)."""
    n, (n1, n2) = 4, (16, 512)
    ring = 2 * (n - 1) * 4 * r // n
    where = crew.layout({"w": (n1, n2)})
    power, alternate = PowerSgd(rank), AcpSgd(rank)
    dense = ring // r * n1 * n2
    state = power.init(where)
    assert sent_by(power, where, state, 0)[0] == min(dense, ring * (n1 + n2))
    state = alternate.init(where)
    for step, wanted in enumerate((n1, n2, n1)):
        got, state = sent_by(alternate, where, state, step)
        assert got == ring * wanted
    assert state.tensors["q@w"].shape == (r, n2) and state.tensors["p@w"].shape == (r, n1)


def test_turns_are_those_of_steps_that_took_effect() -> None:
    """A rejected step is sent again; an exchange every second step takes turns all the same."""
    one, where = AcpSgd(rank=4), crew.layout({"w": (16, 512)})
    first, after = sent_by(one, where, one.init(where), 0)
    assert sent_by(one, where, one.init(where), 1)[0] == first
    second, _ = sent_by(one, where, after, 2)
    assert second == 32 * first


def test_what_does_not_gain_by_factors_goes_as_it_is() -> None:
    where = crew.layout({"a": (8, 8), "bias": (8,), "w": (64, 32), "row": (1, 99), "thin": (50, 2)})
    cut = split(where, 4, steps=1)
    assert [b.names for b in cut.batches] == [("w",)]
    assert cut.dense == ((0, 72), (72 + 2048, where.numel))
    assert [b.names for b in split(where, 4, steps=2).batches] == [("a",), ("w",), ("thin",)]


@both
def test_batches_give_what_matrices_give_one_by_one(one: Exchange) -> None:
    """Equal shapes side by side, equal shapes apart, and vectors between."""
    shapes = {"a": (12, 20), "b": (12, 20), "x": (5,), "c": (12, 20), "d": (30, 9), "y": (2,), "e": (30, 9)}
    where = crew.layout(shapes)
    found, _ = steps(one, where, 3, lambda r, s: crew.bucket(where, r, s).flat)
    for entry in where.entries:
        here = slice(entry.start, entry.start + entry.numel)
        lone = crew.layout({entry.name: entry.shape})
        alone, _ = steps(one, lone, 3, lambda r, s, here=here: crew.bucket(where, r, s).flat[here].clone())
        for outcomes, mine in zip(found, alone, strict=True):
            for o, m in zip(outcomes, mine, strict=True):
                torch.testing.assert_close(o.mean[here], m.mean, rtol=1e-5, atol=1e-5)
                torch.testing.assert_close(o.lost[here], m.lost, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("rows", "cols", "r"), [(600, 1024, 4), (3, 1536, 2), (40, 1000, 4), (300, 1024, 20)])
def test_products_by_a_detour_are_products(rows: int, cols: int, r: int) -> None:
    rng = torch.Generator().manual_seed(0)
    thin, short = torch.randn(2, rows, r, generator=rng), torch.randn(2, r, cols, generator=rng)
    out = torch.empty(2, rows, cols)
    _multiply(thin, short, out=out)
    torch.testing.assert_close(out, thin @ short, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("one", [PowerSgd, AcpSgd])
def test_a_rank_below_one_is_refused(one: type[Exchange]) -> None:
    with pytest.raises(BadInput, match="rank >= 1"):
        one(rank=0)


@pytest.mark.parametrize(
    "inner", [PowerSgd(rank=2), AcpSgd(rank=2), TopK(0.1), TwoShot(Int8()), ErrorFeedback(PowerSgd(rank=2))], ids=repr
)
def test_warm_up_is_the_first_exchange_and_then_the_other(inner: Exchange) -> None:
    where, warm = crew.layout(), Warmup(inner, steps=2)
    states, alone = [warm.init(where)] * RANKS, [inner.init(where)] * RANKS
    for step in range(4):
        inputs = [crew.bucket(where, r, step) for r in range(RANKS)]
        wanted = weighted(inputs)
        outcomes, channels = crew.world(warm, RANKS, [Bucket(where, x.flat.clone()) for x in inputs], states, step)
        states = [o.state for o in outcomes]
        if step < 2:
            torch.testing.assert_close(outcomes[0].mean.double(), wanted, rtol=1e-6, atol=1e-6)
        else:
            after, _ = crew.world(inner, RANKS, inputs, alone, step)
            alone = [o.state for o in after]
            assert torch.equal(after[0].mean, outcomes[0].mean)
        for rank, channel in enumerate(channels):
            priced = CountingChannel(rank, channel.levels)
            priced.charge(warm.traffic(where, channel.levels, rank))
            assert channel.meter.messages == priced.meter.messages
            cap = priced.meter.snapshot()
            assert all(count <= cap.get(link, 0) for link, count in channel.meter.snapshot().items())


def test_warm_up_may_be_longer_before_than_after() -> None:
    where, warm = crew.layout(), Warmup(Dense(), first=TwoShot(Int8()), steps=1)
    assert len(warm.traffic(where, ProcessGroups.flat(2), 0)) == 2
    outcomes, channels = crew.world(warm, 2, [crew.bucket(where, r) for r in range(2)], [warm.init(where)] * 2, step=1)
    assert outcomes[0].lost is None and channels[0].meter.messages == 2


@pytest.mark.parametrize("inner", [Dense(), ErrorFeedback(TopK())], ids=repr)
@pytest.mark.parametrize(
    "first", [ErrorFeedback(TopK()), EControl(TopK()), Hierarchical(ErrorFeedback(TopK()))], ids=repr
)
def test_what_a_first_exchange_would_owe_is_refused(first: Exchange, inner: Exchange) -> None:
    with pytest.raises(BadInput, match="first: wanted a first exchange without error feedback"):
        Warmup(inner, first=first, steps=1)


def test_warm_up_says_what_both_hold() -> None:
    where = crew.layout()
    assert Warmup(Dense()).traits.lossless
    assert not Warmup(TopK()).traits.remembers and Warmup(ErrorFeedback(TopK())).traits.remembers
    assert not Warmup(ErrorFeedback(TopK()), first=TopK()).traits.remembers
    assert Warmup(TopK(0.5)).contraction(where) == TopK(0.5).contraction(where)
    assert Warmup(PowerSgd()).contraction(where) is None
    with pytest.raises(BadInput, match="steps >= 0"):
        Warmup(TopK(), steps=-1)
    assert replace(Warmup(TopK()), steps=3).steps == 3


def over_gloo(seat) -> dict[str, list]:
    """A warm-up over the pump: an empty message in every step of it."""
    from gossamer.comm.channel.group import ProcessGroupChannel, Rendezvous
    from gossamer.comm.comm_thread import CommThread

    one, where, levels = Warmup(PowerSgd(rank=2), steps=1), crew.layout(), crew.levels_of(seat.ranks)
    channel = ProcessGroupChannel(Rendezvous(seat.store(), seat.rank, levels, interface="lo", timeout_s=20.0))
    pump, state, means = CommThread(channel), one.init(where), []
    for step in range(3):
        began = pump.begin([len(one.traffic(where, levels, seat.rank))])
        began.submit(0, one.run(crew.bucket(where, seat.rank, step), state, crew.at(seat.rank, seat.ranks, step)))
        outcome = began.result(0)
        state = outcome.state
        means.append(outcome.mean.tolist())
    pump.close()
    channel.close()
    return {"means": means}


def test_warm_up_over_gloo(pool) -> None:
    one, where = Warmup(PowerSgd(rank=2), steps=1), crew.layout()
    answers = pool.run("exchange.test_low_rank:over_gloo", 2)
    found = crew.steps_in_lockstep(one, 2, 3, where)
    for answer in answers:
        for mine, outcomes in zip(answer["means"], found, strict=True):
            assert torch.equal(torch.tensor(mine), outcomes[0].mean)


def test_buckets_that_begin_with_a_vector_draw_noise_of_their_own() -> None:
    """What a coded left factor carries as it is, is rounded at random: not alike in two buckets."""
    one, found = PowerSgd(rank=2, p_exchange=TwoShot(Int8(stochastic=True))), []
    for name in ("a", "b"):
        where = crew.layout({f"{name}.bias": (64,), f"{name}.weight": (24, 16)})
        outcomes, _ = crew.world(one, 2, [crew.bucket(where, r) for r in range(2)], [one.init(where)] * 2)
        found.append(outcomes[1].lost[:56])  # what it sends to the other rank: numbers of the vector alone
    assert not torch.equal(found[0], found[1])


def test_parameters_with_unequal_turns_go_on_with_the_later_one() -> None:
    """As after buckets were cut anew: whose factor was sent last must not be sent again, and all have the same turn."""
    one, where = AcpSgd(rank=2), crew.layout({"a": (24, 16), "b": (16, 24)})
    state = one.init(where)
    state = replace(state, tensors={**state.tensors, "turn@a": torch.tensor(3)})
    (outcome,), _ = crew.world(one, 1, [crew.bucket(where, 0)], [state])
    assert {int(t) for n, t in outcome.state.tensors.items() if n.startswith("turn@")} == {4}
    assert torch.equal(outcome.state.tensors["p@a"], state.tensors["p@a"]), "odd turns send the right factor"
    assert not torch.equal(outcome.state.tensors["q@a"], state.tensors["q@a"])
