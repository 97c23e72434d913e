"""Trials before training on a machine whose speed varies: which is the best, what is tried next, what is forecast."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gossamer.autotune.trial_steps import Trial, Trials
from gossamer.plan.exchange import (
    CANDIDATES,
    BucketMeasurements,
    Calibration,
    Decision,
    Mixture,
    Option,
    PricedMessage,
    StepMeasurements,
    StepTimes,
    choose,
)

NAMES = CANDIDATES[:3]
WIRES_S = (0.15, 0.04, 0.02)  # of each of two messages


def step(wires_s: tuple[float, ...] = WIRES_S) -> StepMeasurements:
    """A single bucket with an exact candidate and two lossy ones, each of two messages."""
    options = [
        Option((1e-3, 1e-3, 1e-3), (PricedMessage(s, latency_s=1e-4, hops=1),) * 2, int(1e6 * s), loss)
        for s, loss in zip(wires_s, (0.0, 0.1, 0.5), strict=True)
    ]
    bucket = BucketMeasurements(names=("w",), numel=1000, ready_s=0.6, weight=1.0, options=tuple(options))
    return StepMeasurements((bucket,), 1.0, 0.6, 0.0)


def decision(candidate: int, facts: StepMeasurements) -> Decision:
    return replace(choose(facts, lossy=True, candidates=NAMES), best=Mixture.picked_on(facts, (candidate,)))


def tried(candidate: int, *, speed: float = 1.0, wires_s: tuple[float, ...] = WIRES_S) -> Trial:
    """A trial whose steps take what was expected, computing `speed` times as long as all passes at that time."""
    one = decision(candidate, step(wires_s))
    times = StepTimes.forecast(one.best.facts, one.best.picked)
    return Trial.of(one, replace(times, compute_s=speed * times.compute_s), 0.9 * speed)


def of(*made: Trial) -> Trials:
    trials = Trials(steps=10)
    for one in made:
        trials = trials.and_then(one)
    return trials


@pytest.mark.parametrize("speed", [0.7, 1.0, 1.4])
@pytest.mark.parametrize("later", [0, 1])
def test_the_best_is_not_what_found_the_machine_fastest(speed: float, later: int) -> None:
    """All-reduce takes 1.3 s and the mild one 1.08, but 1.48 where computing takes 1.4 times as long."""
    pair = [tried(0), tried(1, speed=speed)]
    assert of(*(pair[::-1] if later else pair)).best.decision.best.picked == (1,)


def test_what_is_as_short_at_one_speed_loses_least() -> None:
    """The harsh one would be 1 % shorter, but looks 10 % shorter."""
    mild, harsh = tried(1), tried(2, speed=0.9, wires_s=(0.15, 0.04, 0.036))
    assert harsh.times.step_s < 0.91 * mild.times.step_s
    assert of(mild, harsh).best is mild and of(harsh, mild).best is mild


@pytest.mark.parametrize("speeds", [(1.0, 1.3, 1.4), (1.4, 1.3, 1.0), (1.3, 0.8, 1.3)])
def test_the_forecast_is_of_the_usual_speed(speeds: tuple[float, float, float]) -> None:
    """Not of that at which the chosen one was tried."""
    trials = of(*(tried(candidate, speed=speed) for candidate, speed in zip((0, 1, 2), speeds, strict=True)))
    best, usual = trials.best, sorted(speeds)[1]
    assert trials.alone_s == pytest.approx(0.9 * usual)
    forecast = best.decision.corrected(best.until(trials.alone_s)).forecast
    one = decision(best.decision.best.picked[0], step())
    slower = Calibration(usual, usual).applied(one.best.facts)
    expected = StepTimes.forecast(slower, one.best.picked)
    assert forecast.step_s == pytest.approx(expected.step_s, rel=0.01)
    assert best.step_s(trials.alone_s) == pytest.approx(expected.step_s, rel=0.01)


def test_what_is_tried_next_is_compared_at_the_usual_speed() -> None:
    """1.25 s are promised where the first would have taken 1.28 as the machine is now; it took 1.08 when it ran."""
    first, last = tried(1), tried(0, speed=1.4)
    promised, uniform = (decision(c, Calibration(1.2, 1.2).applied(step())) for c in (2, 0))
    assert first.times.step_s < promised.best.step_s < 0.98 * first.step_s(0.9 * 1.2)
    assert of(first, last).following(promised, [uniform]) is promised
    assert of(first, tried(0)).following(promised, [uniform]) is None


def test_rivals_are_tried_in_their_order_where_they_might_be_as_fast() -> None:
    """The mild one takes 1.08 s, the harsh one 1.04, all-reduce 1.3, or 1.12 on a faster link."""
    exact, mild, harsh = (decision(candidate, step()) for candidate in range(3))
    near = decision(0, step((0.06, 0.04, 0.02)))
    assert of(tried(1)).following(mild, [harsh, mild, near]) is harsh
    assert of(tried(1), tried(2)).following(mild, [harsh, mild, near]) is near
    assert of(tried(1), tried(2)).following(mild, [harsh, mild, exact]) is None
    assert of(tried(1), tried(2), tried(0)).following(mild, [harsh, mild, near]) is None
    longer = decision(2, step((0.15, 0.04, 0.05)))
    assert of(tried(1)).following(mild, [longer, near]) is near, "what loses more and promises nothing is not tried"


def test_one_trial_is_forecast_as_it_ran() -> None:
    (one,) = (trials := of(tried(1, speed=1.7))).made
    assert one.until(trials.alone_s) == Calibration(1.0, 1.0) and one.step_s(trials.alone_s) == one.times.step_s


def test_passes_count_in_the_time_that_trials_may_take() -> None:
    """Two trials take 8.7 s without passes; to those of the first come 4 of 1 s, after the next and before all."""
    one = tried(1)
    assert of(one, one, one).have_time_for(one.decision)
    assert of(replace(one, alone_s=8.5)).have_time_for(one.decision)
    assert not of(replace(one, alone_s=8.8)).have_time_for(one.decision)
