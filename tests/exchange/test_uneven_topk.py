"""UnevenTopK with fractions that differ: bytes by rank, one mean everywhere, and OPWA against its definition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from exchange import crew
from gossamer import exchange as exchange_methods
from gossamer.comm.bucket import Bucket, Layout
from gossamer.comm.channel.counting import CountingChannel
from gossamer.comm.channel.group import ProcessGroupChannel, Rendezvous
from gossamer.comm.channel.local import LocalChannel, run_lockstep
from gossamer.comm.comm_thread import CommThread
from gossamer.comm.message import ExchangeContext, ExchangeState, Outcome, ProcessGroups
from gossamer.exchange.uneven_topk import UnevenTopK
from gossamer.spec.errors import BadInput
from pool import Seat

WHERE = Layout.of({"w": torch.empty(20, 10)})
UNEVEN = (0.02, 0.1, 0.4, 1.0)


def inputs(ranks: int) -> list[Tensor]:
    return [torch.randn(200, generator=torch.Generator().manual_seed(r)) for r in range(ranks)]


def exchanged(one: exchange_methods.Exchange, given: list[Tensor], shares: Tensor | None = None) -> list[Outcome]:
    """One exchange in lockstep, its bytes checked against its price."""
    ranks, levels = len(given), ProcessGroups.flat(len(given))
    shares = crew.weights(ranks) if shares is None else shares
    rounds = [ExchangeContext(r, levels, shares, (0, 0), 0.1) for r in range(ranks)]
    methods = [one.run(Bucket(WHERE, x.clone()), ExchangeState(), at) for x, at in zip(given, rounds, strict=True)]
    channels = LocalChannel.world(ranks, levels)
    outcomes = run_lockstep(channels, methods)
    for rank, channel in enumerate(channels):
        priced = CountingChannel(rank, levels)
        priced.charge(one.traffic(WHERE, levels, rank))
        assert channel.meter.snapshot() == priced.meter.snapshot()
    assert all(torch.equal(o.mean.nan_to_num(7e7), outcomes[0].mean.nan_to_num(7e7)) for o in outcomes)
    return outcomes


def kept_by(x: Tensor, fraction: float) -> Tensor:
    k = round(fraction * x.numel())
    return torch.where(x.abs() >= x.abs().sort(descending=True).values[k - 1], x, 0.0) if fraction < 0.5 else x


def test_every_rank_keeps_its_own_fraction() -> None:
    given, shares = inputs(4), crew.weights(4)
    outcomes = exchanged(UnevenTopK(UNEVEN), given)
    wanted = [kept_by(x, f) for x, f in zip(given, UNEVEN, strict=True)]
    for x, outcome, kept in zip(given, outcomes, wanted, strict=True):
        assert torch.equal(crew.kept(x, outcome), kept)
    mean = sum(float(w) * kept for w, kept in zip(shares, wanted, strict=True))
    torch.testing.assert_close(outcomes[0].mean, mean)


def test_bytes_are_each_ranks_own() -> None:
    one, levels = UnevenTopK(UNEVEN), ProcessGroups.flat(4)
    sizes = [one.traffic(WHERE, levels, r)[0] for r in range(4)]
    assert [t.nbytes for t in sizes] == [3 * 8 * 4, 3 * 8 * 20, 3 * 8 * 80, 3 * 4 * 200], "a full message has no places"
    assert sizes[0].arriving == (0, 8 * 20, 8 * 80, 4 * 200)
    assert UnevenTopK((0.5,)).traffic(WHERE, levels, 0)[0].nbytes == 3 * 4 * 200


def test_full_fractions_are_the_dense_mean() -> None:
    given = inputs(3)
    dense = exchanged(UnevenTopK((1.0,)), given)[0].mean
    wanted = sum(float(w) * x for w, x in zip(crew.weights(3), given, strict=True))
    torch.testing.assert_close(dense, wanted)
    assert torch.equal(exchanged(UnevenTopK((0.6,)), given)[0].mean, dense)


def test_equal_fractions_are_topk() -> None:
    given = inputs(3)
    assert torch.equal(
        exchanged(UnevenTopK((0.1,)), given)[0].mean,
        exchanged(exchange_methods.build({"topk": {"fraction": 0.1}}), given)[0].mean,
    )


@pytest.mark.parametrize("overlap", [1, 2, 3])
def test_opwa_scales_up_what_few_ranks_kept(overlap: int) -> None:
    given, gamma = inputs(4), 2.5
    plain, opwa = exchanged(UnevenTopK((0.1,)), given), exchanged(UnevenTopK((0.1,), gamma, overlap), given)
    senders = sum((kept_by(x, 0.1) != 0).int() for x in given)
    assert {int(n) for n in senders.unique()} >= {0, 1, 2}, "the inputs must overlap somewhere"
    mask = torch.where((senders >= 1) & (senders <= overlap), gamma, 1.0)
    torch.testing.assert_close(opwa[0].mean, plain[0].mean * mask)
    mean = sum(float(w) * crew.kept(x, o) for w, x, o in zip(crew.weights(4), given, opwa, strict=True))
    torch.testing.assert_close(opwa[0].mean, mean)


def test_opwa_of_one_rank_of_n_is_the_mean_over_senders() -> None:
    """With equal weights, gamma = n and overlap 1: the entries that one rank alone kept arrive undiluted."""
    given = inputs(4)
    mean = exchanged(UnevenTopK((0.1,), 4.0, 1), given, torch.full((4,), 0.25, dtype=torch.float64))[0].mean
    kept = torch.stack([kept_by(x, 0.1) for x in given])
    alone = (kept != 0).sum(0) == 1
    torch.testing.assert_close(mean[alone], kept.sum(0)[alone])


def test_tilted_weights_sum_to_one_and_follow_the_fractions() -> None:
    ones = [torch.ones(200)] * 4
    equal = torch.full((4,), 0.25, dtype=torch.float64)
    mean = exchanged(UnevenTopK((0.1, 0.1, 1.0, 1.0), tilt=1.0), ones, equal)[0].mean
    assert float(mean.max()) == pytest.approx(1.0), "coefficients sum to one where all ranks sent"
    assert float(mean.min()) == pytest.approx(2 / 2.2)
    given = inputs(4)
    outcomes = exchanged(UnevenTopK(UNEVEN, tilt=0.5), given, equal)
    kept = sum(0.25 * crew.kept(x, o) for x, o in zip(given, outcomes, strict=True))
    torch.testing.assert_close(outcomes[0].mean, kept)


def test_feedback_loses_nothing_over_time() -> None:
    one = exchange_methods.build({"error_feedback": {"uneven_topk": {"fractions": list(UNEVEN)}}})
    given, levels, shares = inputs(4), ProcessGroups.flat(4), crew.weights(4)
    states, total = [one.init(WHERE) for _ in range(4)], torch.zeros(200)
    for step in range(5):
        rounds = [ExchangeContext(r, levels, shares, (0, step), 1.0) for r in range(4)]
        methods = [one.run(Bucket(WHERE, given[r].clone()), states[r], rounds[r]) for r in range(4)]
        outcomes = run_lockstep(LocalChannel.world(4, levels), methods)
        states, total = [o.state for o in outcomes], total + outcomes[0].mean
    assert float(states[3].tensors["e"].norm()) == 0.0, "who sends all owes nothing"
    owed = sum(s.tensors["e"] for s in states)
    torch.testing.assert_close(total + owed, sum(5 * float(w) * x for w, x in zip(shares, given, strict=True)))


def test_ranks_without_a_fraction_are_refused() -> None:
    with pytest.raises(BadInput, match="4 ranks"):
        UnevenTopK((0.1, 0.2)).check(WHERE, ProcessGroups.flat(4))
    UnevenTopK((0.1,)).check(WHERE, ProcessGroups.flat(4))
    for wrong in (
        {"fractions": ()},
        {"fractions": (0.0,)},
        {"gamma": 0.0},
        {"overlap_max_senders": 0},
        {"tilt": float("nan")},
    ):
        with pytest.raises(BadInput):
            UnevenTopK(**wrong)


def test_not_a_number_reaches_everybody() -> None:
    given = inputs(3)
    given[1][7] = float("nan")
    assert all(torch.isnan(o.mean[7]) for o in exchanged(UnevenTopK((0.02, 0.1, 0.1)), given))


@pytest.mark.parametrize("gamma", [1.0, 2.0])
def test_over_gloo_as_in_lockstep(pool, gamma: float) -> None:
    one = UnevenTopK(UNEVEN[:3], gamma=gamma)
    wanted = exchanged(one, inputs(3))
    answers = pool.run("exchange.test_uneven_topk:over_gloo", 3, gamma=gamma)
    for rank, answer in enumerate(answers):
        assert torch.equal(torch.tensor(answer["mean"]), wanted[0].mean)
        nbytes = one.traffic(WHERE, ProcessGroups.flat(3), rank)[0].nbytes // 2
        assert answer["sent"] == {f"{rank}>{peer}": 2 * nbytes for peer in range(3) if peer != rank}


def over_gloo(seat: Seat, *, gamma: float) -> dict[str, Any]:
    one, levels = UnevenTopK(UNEVEN[:3], gamma=gamma), ProcessGroups.flat(seat.ranks)
    channel = ProcessGroupChannel(Rendezvous(seat.store(), seat.rank, levels, interface="lo", timeout_s=20.0))
    pump = CommThread(channel)
    step = pump.begin((1, 1))
    at = ExchangeContext(seat.rank, levels, crew.weights(seat.ranks), (0, 0), 0.1)
    mine = inputs(seat.ranks)[seat.rank]
    for job in (1, 0) if seat.rank else (0, 1):
        step.submit(job, one.run(Bucket(WHERE, mine.clone()), ExchangeState(), replace(at, key=(0, job))))
    means = [step.result(job).mean for job in (0, 1)]
    assert torch.equal(*means)
    pump.close()
    sent = channel.meter.snapshot()
    channel.close()
    return {"mean": means[0].tolist(), "sent": sent}


@pytest.mark.parametrize("seed", range(4))
def test_opwa_counts_who_had_something_to_send(seed: int) -> None:
    """Ranks with fewer non-zeros than they send fill up with zeros; which ones these are says nothing."""
    rng = torch.Generator().manual_seed(seed)
    places = torch.randperm(200, generator=rng)[:12].view(3, 4)
    given = [torch.zeros(200).index_fill_(0, places[r], 1.0 + r) for r in range(3)]
    outcomes = exchanged(UnevenTopK((0.4,), 3.0, 1), given)
    wanted = 3.0 * sum(float(w) * x for w, x in zip(crew.weights(3), given, strict=True))
    torch.testing.assert_close(outcomes[0].mean, wanted)
