"""Choose the sync period: the solver of `plan.sync: auto` with `plan.lossy: true`.

It compares synchronous training (with the best exchange from `choose`) and local-update training. In the latter,
islands average every `SyncPeriod.every` steps, fragment by fragment in 4 bits, with a sync delay that hides the
communication. The seconds of a step decide, increased by the extra steps to the same loss. Pure, as `choose` is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gossamer.plan.exchange.choose import WORTH, Decision
from gossamer.spec.clock import BESIDE, Part, TimedTask, compute, cost, play, wire
from gossamer.spec.method_config import Written
from gossamer.spec.units import show_seconds

FRAGMENTS = 4  # as in Streaming DiLoCo: a quarter of the peak rate


@dataclass(frozen=True, slots=True)
class SyncPeriod:
    """A candidate period of local-update training: islands synchronize every `every` steps.

    `dearer`: the fraction of extra steps to the same loss, as measured (benchmarks/links_apart.py). `second_moments`:
    average them every so many rounds too, for optimizers that have them. The global parameters then become the islands'
    mean; otherwise Nesterov momentum updates them.
    """

    every: int
    dearer: float
    second_moments: int = 0


@dataclass(frozen=True, slots=True)
class RoundMeasurements:
    """The measurements of one sync round of local-update training.

    `step_s`: seconds of an island's own step, with its exchange. `fragments_s`: seconds of each fragment on the links
    between islands. `cpu_s`: seconds of encoding; `stolen`: the fraction of them that slows the steps.
    `second_moments_s`: seconds on the links for all second moments, when they are averaged.
    """

    step_s: float
    fragments_s: tuple[float, ...]
    cpu_s: float = 0.0
    stolen: float = 0.0
    second_moments_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LocalUpdateEstimate:
    """The estimate of local-update training: mean seconds of a step, exposed seconds, and the sync delay in steps."""

    step_s: float
    exposed_s: float
    delay: int


@dataclass(frozen=True, slots=True)
class SyncDecision:
    """The chosen sync method. `sync` is None for synchronous training; `reason`: one line for the user."""

    sync: Written | None
    reason: str
    forecast: LocalUpdateEstimate | None = None


def choose_period(
    decision: Decision, facts: RoundMeasurements, *, steps: int, lossy: bool, periods: Sequence[SyncPeriod]
) -> SyncDecision:
    """Choose the sync method for a run of `steps` steps.

    Without `lossy` the choice is synchronous training, and the reason says what local updates would save. A period of
    which the run has fewer than four rounds is excluded.
    """
    usable = [p for p in periods if 4 * p.every <= steps]
    at_once = decision.forecast.step_s * (1 + decision.dearer)
    best = min(usable, key=lambda p: forecast_apart(p, facts).step_s * (1 + p.dearer), default=None)
    if best is None:
        return SyncDecision(None, f"every step: {steps} steps are too few to part")
    line = forecast_apart(best, facts)
    if line.step_s * (1 + best.dearer) > at_once * (1 - WORTH):
        return SyncDecision(
            None,
            f"every step ({show_seconds(decision.forecast.step_s)}): meeting every {best.every} steps "
            f"({show_seconds(line.step_s)}) takes {100 * best.dearer:.0f}% more of them",
        )
    gain = (
        f"{show_seconds(line.step_s)} a step instead of {show_seconds(decision.forecast.step_s)}, of which "
        f"{show_seconds(line.exposed_s)} wait for the wire, for {100 * best.dearer:.0f}% more steps"
    )
    if not lossy:
        return SyncDecision(None, f"every step; plan.lossy: true would part the islands for {best.every} steps: {gain}")
    return SyncDecision(written_of(best, line.delay, steps), f"islands meet every {best.every} steps: {gain}", line)


def forecast_apart(period: SyncPeriod, facts: RoundMeasurements) -> LocalUpdateEstimate:
    """Return the estimate of local-update training with `period`.

    A step takes as long as an island's own, unless a round is still on the links when the next begins. The sync delay
    is the shortest that hides the longest fragment, plus one step of margin.
    """
    busy = play(tasks_of_mean_step(period, facts)).busy_s()
    own, step_s = busy[compute(0)], max(busy.values())
    longest = max(facts.fragments_s, default=0.0)
    delay = min(period.every - 1, math.ceil(longest / step_s) + 1)
    flights = (play(tasks_of_flight(delay * step_s, one)) for one in facts.fragments_s)
    late = sum(cost(flight).exposed_s for flight in flights) / period.every
    return LocalUpdateEstimate(step_s + late, step_s + late - own, delay)


def tasks_of_mean_step(period: SyncPeriod, facts: RoundMeasurements) -> tuple[TimedTask, ...]:
    """Return the tasks of a round, divided by its steps: an island's own step, and the messages of the round beside it.

    Rounds follow each other without waiting for their messages, so a step takes as long as the busier of the two.
    """
    stolen = Part(0, facts.stolen * facts.cpu_s / period.every)
    beside = facts.second_moments_s / period.second_moments if period.second_moments else 0.0
    return (
        TimedTask(compute(0), facts.step_s),
        TimedTask(BESIDE, 0.0, begins=Part(0, 0.0), steals=stolen),
        TimedTask(wire("between"), (sum(facts.fragments_s) + beside) / period.every),
    )


def tasks_of_flight(steps_s: float, fragment_s: float) -> tuple[TimedTask, ...]:
    """Return the tasks of a fragment: the steps of its sync delay, and its messages beside them."""
    return TimedTask(compute(0), steps_s), TimedTask(wire("between"), fragment_s)


def written_of(period: SyncPeriod, delay: int, steps: int) -> Written:
    """Return the plan.sync value with the settings of the measurements, except the sync delay.

    A run of `steps` steps starts local updates after a tenth of them.
    """
    with_own: dict[str, Any] = {"alpha": 0.5, "outer_optimizer": {"nesterov": {"lr": 0.4}}}
    with_common: dict[str, Any] = {
        "keep_local_progress": True,
        "outer_optimizer": "average",
        "average_second_moments_every": period.second_moments,
    }
    return {
        "diloco": {
            "sync_every": period.every,
            "fragments": FRAGMENTS,
            "sync_delay": delay,
            "warmup_steps": steps // 10,
            "exchange": {"two_shot": {"codec": "int4"}},
            **(with_common if period.second_moments else with_own),
        }
    }


PERIODS: tuple[SyncPeriod, ...] = (
    SyncPeriod(16, 0.25),  # loss 1.034 of dense's after 2.0 M tokens, one seed (docs/results/links_apart.json)
    SyncPeriod(
        16, 0.07, second_moments=16
    ),  # 1.013, three seeds, trained weights (docs/results/links_apart_after.json)
)
