"""Whether islands part, and for how long: a pure function, on cases whose answer is known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gossamer import sync
from gossamer.plan.exchange import (
    PERIODS,
    Decision,
    LocalUpdateEstimate,
    RoundMeasurements,
    SyncDecision,
    SyncPeriod,
    choose_period,
    forecast_apart,
    written_of,
)
from gossamer.plan.exchange.choose import WORTH
from gossamer.spec.cost import Cost
from gossamer.spec.units import show_seconds

SHORT, LONG = SyncPeriod(8, 0.05), SyncPeriod(64, 0.2)


def at_every_step(step_s: float, *, dearer: float = 0.0) -> Decision:
    line = Cost(step_s=step_s, exposed_s=step_s - 1.0, wire_s=step_s, sent_bytes=(1,))
    found: Any = SimpleNamespace(forecast=line, dearer=dearer)
    return found  # type: ignore[no-any-return]


def chosen_period(decision: Decision, facts: RoundMeasurements, **given: Any) -> SyncDecision:
    return choose_period(decision, facts, now=decision.forecast, **given)


def facts(round_s: float, *, step_s: float = 1.0) -> RoundMeasurements:
    return RoundMeasurements(step_s, (round_s / 4,) * 4)


def test_a_wire_that_keeps_up_is_waited_for_by_nobody() -> None:
    assert forecast_apart(SHORT, facts(4.0)) == LocalUpdateEstimate(step_s=1.0, exposed_s=0.0, delay=2)


def test_the_delay_hides_the_longest_fragment() -> None:
    line = forecast_apart(LONG, RoundMeasurements(1.0, (0.5, 3.2, 0.5)))
    assert line.delay == 5 and line.step_s == 1.0


def test_a_round_that_takes_longer_than_its_steps_stretches_them() -> None:
    line = forecast_apart(SHORT, facts(16.0))
    assert line.step_s == 2.0 and line.exposed_s == 1.0 and line.delay <= SHORT.every - 1


def test_encoding_shares_the_core_with_the_steps() -> None:
    line = forecast_apart(SHORT, RoundMeasurements(1.0, (0.1,), cpu_s=0.8, stolen=0.5))
    assert line.step_s == pytest.approx(1.05) and line.exposed_s == 0.0


def test_the_shortest_period_that_keeps_up_is_taken() -> None:
    slow = chosen_period(at_every_step(3.0), facts(6.0), steps=1000, lossy=True, periods=(SHORT, LONG))
    assert slow.sync == written_of(SHORT, 3, 1000) and slow.forecast is not None
    assert slow.reason == (
        "islands synchronize every 8 steps: 1 s a step (0% of it waits for messages) instead of 3 s a step "
        "(67% of it waits for messages), for 5% more steps; local updates are worth it from 1.11 s a step on"
    )
    slower = chosen_period(at_every_step(30.0), facts(60.0), steps=1000, lossy=True, periods=(SHORT, LONG))
    assert slower.forecast is not None and slower.forecast.step_s == 1.0
    assert "every 64 steps" in slower.reason


def test_what_a_step_loses_at_once_counts_too() -> None:
    """1.12 s against 1.05: not worth parting; with a tenth more for what feedback leaves out, it is."""
    near = facts(1.0)
    assert chosen_period(at_every_step(1.10), near, steps=1000, lossy=True, periods=(SHORT,)).sync is None
    assert chosen_period(at_every_step(1.10, dearer=0.1), near, steps=1000, lossy=True, periods=(SHORT,)).sync


def test_a_fast_link_keeps_gradients_together() -> None:
    chosen = chosen_period(at_every_step(1.01), facts(0.01), steps=1000, lossy=True, periods=(SHORT, LONG))
    assert chosen.sync is None and chosen.reason == (
        "every step: 1.01 s a step (1% of it waits for messages); islands that synchronize every 8 steps "
        "would take 1 s a step (0% of it waits for messages) and 5% more steps: local updates are worth it from 1.11 s "
        "a step on"
    )


def test_the_seconds_that_would_turn_the_choice_turn_it() -> None:
    """Whatever is charged on either side."""
    period = SyncPeriod(8, 0.25, because="measured with another optimizer")
    for dearer in (0.0, 0.1):
        said = chosen_period(at_every_step(1.1, dearer=dearer), facts(4.0), steps=64, lossy=True, periods=(period,))
        assert "25% more steps (measured with another optimizer): local updates are worth it from " in said.reason
        turn_s = 1.25 / (1 - WORTH) / (1 + dearer)
        assert f"local updates are worth it from {show_seconds(turn_s)} a step on" in said.reason
        for step_s, parts in ((turn_s * 0.999, False), (turn_s * 1.001, True)):
            chosen = chosen_period(
                at_every_step(step_s, dearer=dearer), facts(4.0), steps=64, lossy=True, periods=[period]
            )
            assert bool(chosen.sync) is parts and f"{show_seconds(turn_s)} a step on" in chosen.reason


def test_an_optimizer_without_second_moments_is_told_what_adamw_would_need() -> None:
    other, adamw = PERIODS
    assert not other.second_moments and f"adamw has them and needs {100 * adamw.dearer:.0f}%" in other.because


def test_without_permission_islands_stay_together_and_the_gain_is_told() -> None:
    chosen = chosen_period(at_every_step(9.0), facts(6.0), steps=1000, lossy=False, periods=(SHORT,))
    assert chosen.sync is None and chosen.forecast is None
    assert "plan.lossy: true would allow local updates of 8 steps" in chosen.reason


def test_a_run_of_few_rounds_does_not_part() -> None:
    chosen = chosen_period(at_every_step(9.0), facts(6.0), steps=31, lossy=True, periods=(SHORT,))
    assert chosen.sync is None
    assert chosen.reason == "every step: 31 steps are too few for local updates: 4 rounds of 8 steps need 32"
    enough = chosen_period(at_every_step(9.0), facts(6.0), steps=32, lossy=True, periods=(SHORT,))
    assert enough.sync is not None


@pytest.mark.parametrize("period", PERIODS)
def test_every_setting_can_be_built_with_every_delay(period: SyncPeriod) -> None:
    for delay in range(period.every):
        loop = sync.build(written_of(period, delay, 1000)).loop
        assert loop is not None and loop.sync_every == period.every and loop.warmup.steps == 100
