"""What steps took corrects what was measured: the factors that made a step longer are found again."""

from __future__ import annotations

import random

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


def test_hidden_messages_say_nothing_of_the_links() -> None:
    facts, picked = step(wire_s=1e-4), (2,) * COUNT
    slower = took(facts, Calibration(1.0, 1.0, 1.5), picked)
    assert Calibration.fit(facts, picked, slower).messages == 1.0


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
