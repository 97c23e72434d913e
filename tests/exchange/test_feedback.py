"""What feedback promises: nothing is lost for good, whatever rates, weights, types and stops come in between."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from exchange import crew
from gossamer import exchange as exchange_methods
from gossamer.comm.bucket import Bucket, Layout
from gossamer.comm.channel.local import LocalChannel, run_lockstep
from gossamer.comm.message import ExchangeState, Outcome
from gossamer.exchange import Exchange
from gossamer.exchange.ef21 import EF21
from gossamer.exchange.error_feedback import ErrorFeedback
from gossamer.exchange.topk import TopK
from gossamer.spec.errors import BadInput

SPARSE = {"topk": {"fraction": 0.1}}
OWING = ["error_feedback", "econtrol"]  # what the parameters are owed is in `e`
TRACKING = ["ef21", "ef21_sgdm", "econtrol"]  # what all know of me is in `h`, of all in `agg`
ALL = [*OWING, "ef21", "ef21_sgdm", "delta_reference"]
WHERE = crew.layout()


class Run:
    """Steps of one exchange by some ranks, each step with its own rate and weights."""

    def __init__(self, one: Exchange, ranks: int, where: Layout = WHERE) -> None:
        self.one, self.ranks, self.where = one, ranks, where
        self.states: list[ExchangeState] = [one.init(where) for _ in range(ranks)]
        self.given = torch.zeros(where.numel, dtype=torch.float64)  # sum_t lr_t sum_i w_i x_i
        self.got = torch.zeros(where.numel, dtype=torch.float64)  # sum_t lr_t mean_t
        self.size = 0.0
        self.at = 0

    def step(self, *, lr: float = 1.0, weights: Tensor | None = None, xs: list[Tensor] | None = None) -> list[Outcome]:
        weights = crew.weights(self.ranks) if weights is None else weights
        levels, n = crew.levels_of(self.ranks), self.ranks
        xs = [crew.bucket(self.where, r, self.at).flat for r in range(n)] if xs is None else xs
        rounds = [replace(crew.at(r, n, self.at, lr, levels), weights=weights) for r in range(n)]
        mean = sum(w * x.double() for w, x in zip(weights, xs, strict=True))
        methods = [self.one.run(Bucket(self.where, xs[r].clone()), self.states[r], rounds[r]) for r in range(n)]
        outcomes = run_lockstep(LocalChannel.world(n, levels), methods)
        self.given += lr * mean
        self.got += lr * outcomes[0].mean.double()
        self.size += abs(lr) * float(mean.norm())
        self.states = [o.state for o in outcomes]
        self.at += 1
        return outcomes

    def sum_of(self, name: str) -> Tensor:
        return sum((s.tensors[name].double() for s in self.states), torch.zeros(self.where.numel, dtype=torch.float64))

    def is_paid(self, tolerance: float = 1e-5) -> bool:
        """Nothing but what the residuals hold is missing."""
        return float((self.got + self.sum_of("e") - self.given).norm()) <= tolerance * self.size


def wrapped(name: str, inner: object = SPARSE, **fields: object) -> Exchange:
    return exchange_methods.build({name: {"inner": inner, **fields}})


def changing(ranks: int, step: int) -> Tensor:
    """Unequal batches: other shares at every step, and now and then a rank without any."""
    parts = torch.rand(ranks, generator=torch.Generator().manual_seed(step), dtype=torch.float64) + 0.1
    if ranks > 1 and step % 3 == 1:
        parts[step % ranks] = 0.0
    return parts / parts.sum()


@pytest.mark.parametrize("name", OWING)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_was_sent_and_what_is_owed_is_what_was_given(name: str, ranks: int) -> None:
    run = Run(wrapped(name), ranks)
    for _ in range(30):
        run.step()
    assert run.is_paid()
    assert float(run.sum_of("e").norm()) > 0.01 * run.size, "nothing was ever owed: this proves nothing"


@pytest.mark.parametrize("name", OWING)
def test_that_holds_by_rate_where_the_rate_changes_and_rests(name: str) -> None:
    run = Run(wrapped(name), 3)
    for lr in (0.0, 1e-3, 0.01, 0.1, 0.0, 0.1, 0.03, 0.0, 1e-45, 1e-3, 0.2):
        run.step(lr=lr)
    assert run.is_paid()


@pytest.mark.parametrize("name", OWING)
def test_that_holds_without_rates_where_they_are_not_tracked(name: str) -> None:
    """Then e is owed in gradients, and a small rate later on pays a large rate's debt too late: the default tracks."""
    run, tracked = Run(wrapped(name, track_lr=False), 2), Run(wrapped(name), 2)
    sent = given = torch.zeros(WHERE.numel, dtype=torch.float64)
    for step, lr in enumerate((0.1, 0.0, 0.5, 0.01)):
        xs = [crew.bucket(WHERE, r, step).flat.double() for r in range(2)]
        given = given + sum(w * x for w, x in zip(crew.weights(2), xs, strict=True))
        sent = sent + run.step(lr=lr)[0].mean.double()
        tracked.step(lr=lr)
    assert float((sent + run.sum_of("e") - given).norm()) < 1e-5 * float(given.norm())
    assert tracked.is_paid() and not run.is_paid()


@pytest.mark.parametrize("name", OWING)
def test_that_holds_where_batches_are_unequal(name: str) -> None:
    """Weights that change from step to step; a rank that has none this time loses nothing of its residual."""
    run = Run(wrapped(name), 3)
    for step in range(20):
        run.step(lr=0.1 + 0.01 * step, weights=changing(3, step))
    assert run.is_paid()


@pytest.mark.parametrize("name", OWING)
def test_what_a_narrow_type_rounds_off_is_owed(name: str) -> None:
    """A bfloat16 mean has 8 bits: over 30 steps their loss would be seen a hundredfold."""
    run = Run(wrapped(name), 3, crew.layout(dtype=torch.bfloat16))
    for _ in range(30):
        (outcome, *_) = run.step()
        assert outcome.mean.dtype == torch.bfloat16
    assert run.is_paid()


@pytest.mark.parametrize("name", TRACKING)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("unequal", [False, True])
def test_the_aggregate_is_the_sum_of_what_all_know(name: str, ranks: int, unequal: bool) -> None:
    """agg = sum_i h_i where h_i counts weighted inputs, also where weights change; the same bits on every rank."""
    run = Run(wrapped(name), ranks)
    for step in range(30):
        run.step(weights=changing(ranks, step) if unequal else None)
        aggregates = [s.tensors["agg"] for s in run.states]
        assert all(torch.equal(a, aggregates[0]) for a in aggregates)
        error = (aggregates[0].double() - run.sum_of("h")).norm()
        assert float(error) <= 1e-5 * sum(float(s.tensors["h"].norm()) for s in run.states)


@pytest.mark.parametrize("name", TRACKING)
def test_the_mean_is_the_aggregate_and_may_be_changed_by_who_gets_it(name: str) -> None:
    outcome = Run(wrapped(name), 2).step()[0]
    assert torch.equal(outcome.mean, outcome.state.tensors["agg"])
    outcome.mean.zero_()
    assert float(outcome.state.tensors["agg"].norm()) > 0


@pytest.mark.parametrize("name", ["ef21", "ef21_sgdm", "econtrol"])
def test_settled_inputs_are_learned_though_the_ranks_differ(name: str) -> None:
    """With inputs that do not change, the mean becomes exact; one reference for all ranks does not get there."""
    run, shared = Run(wrapped(name), 3), Run(wrapped("delta_reference"), 3)
    xs = [crew.bucket(WHERE, r).flat for r in range(3)]
    wanted = sum(w * x.double() for w, x in zip(crew.weights(3), xs, strict=True))

    def error(one: Run) -> float:
        return float((one.step(xs=xs)[0].mean.double() - wanted).norm() / wanted.norm())

    for _ in range(300):
        run.step(xs=xs)
        shared.step(xs=xs)
    assert error(run) < 1e-3
    assert error(shared) > 0.1


def test_one_reference_is_enough_where_all_ranks_hold_the_same() -> None:
    run, own = Run(wrapped("delta_reference"), 3), Run(wrapped("ef21"), 3)
    x = crew.bucket(WHERE, 0).flat
    for _ in range(20):
        ours, theirs = run.step(xs=[x] * 3)[0].mean, own.step(xs=[x] * 3)[0].mean
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours, x, rtol=1e-5, atol=1e-5)


def test_a_reference_says_what_it_kept_so_that_feedback_goes_around_it() -> None:
    run = Run(wrapped("error_feedback", {"delta_reference": SPARSE}), 3)
    for step in range(20):
        run.step(weights=changing(3, step))
    assert run.is_paid()


def test_econtrol_without_eta_is_ef21_bit_for_bit() -> None:
    control, plain = Run(wrapped("econtrol", eta=0.0), 3), Run(wrapped("ef21"), 3)
    for step in range(12):
        weights = changing(3, step)
        ours, theirs = control.step(weights=weights, lr=0.3), plain.step(weights=weights, lr=0.3)
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a.mean, b.mean)
            assert all(torch.equal(a.state.tensors[k], b.state.tensors[k]) for k in ("h", "agg"))


def test_ef21_with_no_memory_in_its_momentum_is_ef21() -> None:
    momentum, plain = Run(wrapped("ef21_sgdm", a=1.0), 2), Run(wrapped("ef21"), 2)
    for _ in range(5):
        torch.testing.assert_close(momentum.step()[0].mean, plain.step()[0].mean, rtol=1e-5, atol=1e-6)


def test_momentum_is_that_of_the_weighted_inputs() -> None:
    run, expected = Run(wrapped("ef21_sgdm", "dense", a=0.25), 2), torch.zeros(WHERE.numel, dtype=torch.float64)
    for step in range(8):
        xs = [crew.bucket(WHERE, r, step).flat.double() for r in range(2)]
        expected = 0.75 * expected + 0.25 * sum(w * x for w, x in zip(crew.weights(2), xs, strict=True))
        torch.testing.assert_close(run.step()[0].mean.double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", [n for n in ALL if n != "ef21_sgdm"])
@pytest.mark.parametrize("inner", ["dense", {"topk": {"fraction": 1.0}}])
def test_around_an_exchange_that_loses_nothing_it_is_the_plain_mean(name: str, inner: object) -> None:
    run = Run(wrapped(name, inner), 3)
    for _ in range(10):
        before = run.given.clone()
        (outcome, *_) = run.step(lr=0.1)
        torch.testing.assert_close(outcome.mean.double(), (run.given - before) / 0.1, rtol=1e-4, atol=1e-5)
    if name in OWING:
        assert float(run.sum_of("e").norm()) < 1e-5 * run.size


def test_the_virtual_iterate_of_econtrol_descends_by_the_plain_mean() -> None:
    """v = x - sum_i e_i moves by exactly -lr times the mean gradient, whatever was compressed."""
    run, x = Run(wrapped("econtrol"), 3), torch.zeros(WHERE.numel, dtype=torch.float64)
    for step in range(20):
        virtual, given, lr = x - run.sum_of("e"), run.given.clone(), 0.02 * (1 + step % 3)
        x = x - lr * run.step(lr=lr)[0].mean.double()
        moved, wanted = x - run.sum_of("e") - virtual, given - run.given
        assert float((moved - wanted).norm()) < 1e-5 * float(wanted.norm() + run.sum_of("e").norm())


@pytest.mark.parametrize(
    "inner",
    [
        {"two_shot": {"codec": "int8"}},
        {"hierarchical": {"inter": SPARSE}},
        {"hierarchical": {"inter": {"two_shot": {"codec": "int8"}}}},
        {"random_k": {"fraction": 0.1}},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", OWING)
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_it_nests_around_other_exchanges(name: str, inner: object, ranks: int) -> None:
    run = Run(wrapped(name, inner), ranks)
    for step in range(12):
        outcomes = run.step(lr=0.1 + 0.02 * step)
        assert all(torch.equal(o.mean, outcomes[0].mean) for o in outcomes)
    assert run.is_paid()


@pytest.mark.parametrize("name", OWING)
def test_a_world_of_one_pays_everything_once_it_gets_nothing_new(name: str) -> None:
    run = Run(wrapped(name), 1)
    run.step()
    first = float(run.sum_of("e").norm())
    for _ in range(400):
        run.step(xs=[torch.zeros(WHERE.numel)])
    assert float(run.sum_of("e").norm()) < 0.02 * first


@pytest.mark.parametrize("name", ALL)
def test_a_step_that_is_not_committed_leaves_no_trace(name: str) -> None:
    """Closed before its answer, or rejected after it: from the old state the step gives the same bits again."""
    run = Run(wrapped(name), 2)
    for _ in range(3):
        run.step(lr=0.1)
    states, at = run.states, run.at
    closed = run.one.run(crew.bucket(WHERE, 0, 7), states[0], crew.at(0, 2, 7))
    next(closed)
    closed.close()
    poisoned = torch.full((WHERE.numel,), torch.nan)
    assert not bool(torch.isfinite(run.step(xs=[poisoned, poisoned])[0].mean).all())
    run.states, run.at = states, at
    again = run.step(lr=0.1)
    straight = Run(wrapped(name), 2)
    wanted = [straight.step(lr=0.1) for _ in range(4)][-1]
    for a, b in zip(again, wanted, strict=True):
        assert torch.equal(a.mean, b.mean)
        assert all(torch.equal(v, w) for (_, v), (_, w) in zip(a.state.flatten(), b.state.flatten(), strict=True))


@pytest.mark.parametrize("name", [n for n in ALL if n != "error_feedback"])
def test_two_memories_around_each_other_are_refused(name: str) -> None:
    with pytest.raises(BadInput, match="wanted an inner exchange without error feedback"):
        wrapped(name, {"error_feedback": SPARSE})


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(BadInput, match="0 <= eta <= 1"):
        wrapped("econtrol", eta=1.5)
    with pytest.raises(BadInput, match="0 < a <= 1"):
        wrapped("ef21_sgdm", a=0.0)


def test_eta_is_that_of_the_very_bucket_and_too_much_of_it_is_refused() -> None:
    control, levels = wrapped("econtrol"), crew.levels_of(2)
    delta = TopK(0.1).contraction(WHERE)
    assert delta is not None and control.eta_of(WHERE) == pytest.approx(delta / (2 - delta))
    assert wrapped("econtrol", "dense").eta_of(WHERE) == 0.5
    assert wrapped("econtrol", {"two_shot": {"codec": "int8"}}).eta_of(WHERE) <= 0.5
    control.check(WHERE, levels)
    wrapped("econtrol", eta=0.1).check(WHERE, levels)
    with pytest.raises(BadInput, match="the residual grows without bound"):
        wrapped("econtrol", eta=0.2).check(WHERE, levels)


def test_error_feedback_asks_its_inner_exchange_about_what_it_will_send() -> None:
    """In float32, whatever the bucket holds: traffic and check see the same layout."""
    asked: list[torch.dtype] = []

    class Asked(TopK):
        def check(self, layout: Layout, levels: object) -> None:
            asked.append(layout.dtype)

    for one in (ErrorFeedback(Asked()), EF21(Asked())):
        one.check(crew.layout(dtype=torch.bfloat16), crew.levels_of(2))
    assert asked == [torch.float32] * 2
