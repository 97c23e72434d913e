"""What steps took corrects what was measured: the factors that made a step longer are found again."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from gossamer.plan.exchange import (
    CANDIDATES,
    BucketMeasurements,
    Calibration,
    Option,
    PricedMessage,
    StepMeasurements,
    StepTimes,
    choose,
)
from gossamer.plan.exchange.send_order import schedule
from gossamer.spec.units import show_seconds

COUNT = 6


def option(rng: random.Random, wire_s: float, loss: float) -> Option:
    messages = tuple(PricedMessage(wire_s * rng.uniform(0.8, 1.2), latency_s=1e-3, hops=2) for _ in range(2))
    return Option(tuple(rng.uniform(2e-3, 6e-3) for _ in range(3)), messages, int(1e6 * wire_s), loss)


def step(seed: int = 0, *, wire_s: float = 0.05) -> StepMeasurements:
    """Six buckets, each with an exact candidate, a milder lossy one and a strong one."""
    rng = random.Random(seed)
    kinds = ((8.0, 0.0), (1.0, 0.01), (0.1, 0.3))
    buckets = tuple(
        BucketMeasurements(
            names=(f"w{b}",),
            numel=1000,
            ready_s=0.5 * (b + 1) / COUNT,
            weight=1 / COUNT,
            options=tuple(option(rng, wire_s * k, loss) for k, loss in kinds),
        )
        for b in range(COUNT)
    )
    return StepMeasurements(buckets, 0.8, 0.5, 0.5)


def took(facts: StepMeasurements, true: Calibration, picked: tuple[int, ...]) -> StepTimes:
    return StepTimes.forecast(true.applied(facts), picked)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("true", [(1.0, 1.0, 1.0), (1.3, 1.0, 2.0), (0.8, 2.0, 1.0), (1.0, 0.5, 0.5), (2.0, 1.5, 4.0)])
def test_the_factors_of_a_step_are_found(seed: int, true: tuple[float, float, float]) -> None:
    """Where messages are waited for, so that their factor shows."""
    facts, picked = step(seed, wire_s=0.3), (1,) * COUNT
    found = Calibration.fit(facts, picked, took(facts, Calibration(*true), picked))
    assert found.encode == pytest.approx(true[1], rel=1e-6)
    assert found.compute == pytest.approx(true[0], rel=0.02)
    assert found.messages == pytest.approx(true[2], rel=0.08)
    again = StepTimes.forecast(found.applied(facts), picked)
    assert again.step_s == pytest.approx(took(facts, Calibration(*true), picked).step_s, rel=0.025)


def test_a_busy_machine_is_no_fast_encoder() -> None:
    """Encoding was timed by the clock while its thread ran a third of the time; steps say how long the thread ran."""
    facts, picked = replace(step(wire_s=0.3), ran=1 / 3), (1,) * COUNT
    options = [bucket.options[1] for bucket in facts.buckets]
    ran_s = sum(one.cpu_s for one in options if one is not None) / 3
    steps = replace(StepTimes.forecast(facts, picked), encode_s=ran_s)
    found = Calibration.fit(facts, picked, steps)
    assert (found.compute, found.encode, found.messages) == pytest.approx((1.0, 1.0, 1.0))
    assert found.applied(facts).ran == facts.ran


def test_hidden_messages_say_nothing_of_the_links() -> None:
    facts, picked = step(wire_s=1e-4), (2,) * COUNT
    slower = took(facts, Calibration(1.0, 1.0, 1.5), picked)
    assert Calibration.fit(facts, picked, slower).messages == 1.0


@pytest.mark.parametrize("waits_s", [-0.06, 0.06])
def test_waits_that_small_messages_cannot_have_say_nothing_of_bytes(waits_s: float) -> None:
    """A step that ends with a long decoding, of which the clock shows less: no link is eight times as fast."""
    facts, picked = step(wire_s=1e-4), (2,) * COUNT
    slow = Calibration(encode=15.0).applied(facts)
    told = StepTimes.forecast(slow, picked)
    found = Calibration.fit(slow, picked, replace(told, exposed_s=told.exposed_s + waits_s))
    assert told.exposed_s > 0.06
    assert found.messages == 1.0
    assert found.late_s >= 0.0, "their latency is a thousandth of what is missing"


@pytest.mark.parametrize("seed", range(3))
def test_late_messages_of_few_bytes_say_nothing_of_many(seed: int) -> None:
    """Messages arrive 15 ms later: what an all-reduce of 80 times the bytes takes stays about what it was."""
    facts, small, dense = step(seed, wire_s=0.02), (2,) * COUNT, (0,) * COUNT
    true = Calibration(late_s=0.015)
    found = Calibration.fit(facts, small, took(facts, true, small))
    assert found.messages == 1.0
    assert StepTimes.forecast(found.applied(facts), small).step_s == pytest.approx(
        took(facts, true, small).step_s, rel=0.025
    )
    assert took(facts, true, small).exposed_s > 1.2 * StepTimes.forecast(facts, small).exposed_s
    assert StepTimes.forecast(found.applied(facts), dense).step_s == pytest.approx(
        took(facts, true, dense).step_s, rel=0.02
    )
    assert f"messages x1.00 and {show_seconds(found.late_s)} later" in found.show()


def test_messages_that_were_late_may_be_in_time_again() -> None:
    """What one correction has added the next one takes away, and no message arrives before it is sent."""
    facts, small = step(wire_s=0.02), (2,) * COUNT
    late = Calibration(late_s=0.015).applied(facts)
    found = Calibration.fit(late, small, took(facts, Calibration(), small))
    assert found.messages == 1.0 and found.late_s < -0.005 and "earlier" in found.show()
    again = Calibration(late_s=-1.0).applied(late)
    assert all(m.latency_s == 0.0 for b in again.buckets for o in b.options if o for m in o.messages)


@pytest.mark.parametrize("times", [0.02, 0.1, 1.0, 8.0, 10.0, 20.0])
def test_a_rank_that_is_much_slower_or_faster_says_nothing_of_messages(times: float) -> None:
    """What the limit leaves out of computing was put down to late messages and to bytes: here x6.4 of them."""
    one = Option((0.0, 0.0), (PricedMessage(0.1),), 1000, 0.0)
    facts = StepMeasurements((BucketMeasurements(("w",), 1000, 0.2, 1.0, (one,)),), 0.3, 0.2, 0.0)
    found = Calibration.fit(facts, (0,), StepTimes(0.3 * times, 0.1, 0.0))
    assert (found.messages, found.late_s) == (1.0, 0.0)
    assert found.compute == pytest.approx(min(8.0, max(1 / 8, times)))


@pytest.mark.parametrize("times", [0.02, 12.0, 30.0])
def test_encoding_that_is_much_slower_or_faster_says_nothing_of_messages(times: float) -> None:
    facts, picked = step(wire_s=0.3), (1,) * COUNT
    found = Calibration.fit(facts, picked, took(facts, Calibration(encode=times), picked))
    assert (found.compute, found.messages, found.late_s) == (pytest.approx(1.0), 1.0, 0.0)
    assert found.encode == pytest.approx(min(8.0, max(1 / 8, times)))


def test_slower_links_are_still_found_beside_a_rank_that_is_ten_times_slower() -> None:
    one = Option((0.0, 0.0), (PricedMessage(0.5),), 1000, 0.0)
    facts = StepMeasurements((BucketMeasurements(("w",), 1000, 0.2, 1.0, (one,)),), 0.3, 0.2, 0.0)
    found = Calibration.fit(facts, (0,), StepTimes(3.0, 2.0, 0.0))
    assert found.messages == pytest.approx(4.0, rel=0.08)


def test_ranks_that_wait_for_a_late_one_say_nothing_of_the_links() -> None:
    """Rank 0 reads its rows half a second longer than rank 1, which computes a millisecond longer."""
    late, waits = (0.300, 0.05, 0.01), (0.301, 0.55, 0.02)
    for rows in ((late, waits), (waits, late)):
        assert StepTimes.of_ranks(rows) == StepTimes(0.301, 0.05, 0.02)


@pytest.mark.parametrize("measured", [StepTimes(0.0, 0.0, 0.0), StepTimes(1e9, 1e9, 1e9), StepTimes(0.8, 0.0, 1e-12)])
def test_what_cannot_be_is_bounded(measured: StepTimes) -> None:
    found = Calibration.fit(step(), (1,) * COUNT, measured)
    assert all(1 / 8 <= one <= 8 for one in (found.compute, found.encode, found.messages))
    schedule(found.applied(step()), [bucket.option(1) for bucket in step().buckets])


def test_a_step_that_waits_gets_a_harsher_exchange_and_one_with_slack_a_milder() -> None:
    """Each is worth the change; a choice that is as long and loses as much is not."""
    facts, names = step(wire_s=0.02), CANDIDATES[:3]
    now = choose(facts, lossy=True, candidates=names).best
    for messages, harsher in ((8.0, True), (0.125, False)):
        there = Calibration(messages=messages).applied(facts)
        then = choose(there, lossy=True, candidates=names)
        assert then.replaces(now.on(there))
        assert (then.best.lost > now.lost) == harsher
        assert then.best.step_s < now.on(there).step_s or then.best.lost < now.lost / 2
        assert not then.replaces(then.best)
