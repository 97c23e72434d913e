"""Whether islands part, and for how long: a pure function, on cases whose answer is known."""

from __future__ import annotations

import pytest

from gossamer import sync
from gossamer.plan.exchange import (
    PERIODS,
    Decision,
    LocalUpdateEstimate,
    RoundMeasurements,
    SyncPeriod,
    choose_period,
    forecast_apart,
    written_of,
)
from gossamer.spec.cost import Cost

SHORT, LONG = SyncPeriod(8, 0.05), SyncPeriod(64, 0.2)


def at_every_step(step_s: float, *, dearer: float = 0.0) -> Decision:
    line = Cost(step_s=step_s, exposed_s=step_s - 1.0, wire_s=step_s, sent_bytes=(1,))
    return Decision("dense", "", line, line, dearer=dearer)


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
    slow = choose_period(at_every_step(3.0), facts(6.0), steps=1000, lossy=True, periods=(SHORT, LONG))
    assert slow.sync == written_of(SHORT, 3, 1000) and slow.forecast is not None
    assert "every 8 steps" in slow.reason and "5% more steps" in slow.reason
    slower = choose_period(at_every_step(30.0), facts(60.0), steps=1000, lossy=True, periods=(SHORT, LONG))
    assert slower.forecast is not None and slower.forecast.step_s == 1.0
    assert "every 64 steps" in slower.reason


def test_what_a_step_loses_at_once_counts_too() -> None:
    """1.12 s against 1.05: not worth parting; with a tenth more for what feedback leaves out, it is."""
    near = facts(1.0)
    assert choose_period(at_every_step(1.10), near, steps=1000, lossy=True, periods=(SHORT,)).sync is None
    assert choose_period(at_every_step(1.10, dearer=0.1), near, steps=1000, lossy=True, periods=(SHORT,)).sync


def test_a_fast_link_keeps_gradients_together() -> None:
    chosen = choose_period(at_every_step(1.01), facts(0.01), steps=1000, lossy=True, periods=(SHORT, LONG))
    assert chosen.sync is None and chosen.reason.startswith("every step (1.01 s)")


def test_without_permission_islands_stay_together_and_the_gain_is_told() -> None:
    chosen = choose_period(at_every_step(9.0), facts(6.0), steps=1000, lossy=False, periods=(SHORT,))
    assert chosen.sync is None and chosen.forecast is None
    assert "plan.lossy: true would part the islands for 8 steps" in chosen.reason


def test_a_run_of_few_rounds_does_not_part() -> None:
    chosen = choose_period(at_every_step(9.0), facts(6.0), steps=31, lossy=True, periods=(SHORT,))
    assert chosen.sync is None and "too few" in chosen.reason


@pytest.mark.parametrize("period", PERIODS)
def test_every_setting_can_be_built_with_every_delay(period: SyncPeriod) -> None:
    for delay in range(period.every):
        loop = sync.build(written_of(period, delay, 1000)).loop
        assert loop is not None and loop.sync_every == period.every and loop.warmup.steps == 100
