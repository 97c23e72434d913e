"""Choose the sync period: the solver of `plan.sync: auto` with `plan.lossy: true`.

It compares synchronous training (with the best exchange from `choose`) and local-update training. In the latter,
islands average every `SyncPeriod.every` steps, fragment by fragment in 4 bits, with a sync delay that hides the
communication. The seconds of a step decide, increased by the extra steps to the same loss. Pure, as `choose` is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gossamer.plan.exchange.calibration import Calibration
from gossamer.plan.exchange.choose import WORTH, Decision
from gossamer.spec.clock import BESIDE, Part, TimedTask, compute, cost, play, wire
from gossamer.spec.cost import Cost
from gossamer.spec.method_config import Written
from gossamer.spec.units import show_seconds

FRAGMENTS = 4  # as in Streaming DiLoCo: a quarter of the peak rate
_ROUNDS = 4  # the fewest of a run that parts


@dataclass(frozen=True, slots=True)
class SyncPeriod:
    """A candidate period of local-update training: islands synchronize every `every` steps.

    `dearer`: the fraction of extra steps to the same loss, as measured (benchmarks/links_apart.py). `second_moments`:
    average them every so many rounds too, for optimizers that have them. The global parameters then become the islands'
    mean; otherwise Nesterov momentum updates them. `because`: why `dearer` is what it is, for the user.
    """

    every: int
    dearer: float
    second_moments: int = 0
    because: str = ""


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

    def corrected(self, by: Calibration) -> RoundMeasurements:
        """Return the measurements with computing, encoding and messages between islands longer by their factors."""
        return replace(
            self,
            step_s=self.step_s * by.compute,
            fragments_s=tuple(s * by.messages for s in self.fragments_s),
            cpu_s=self.cpu_s * by.encode,
            second_moments_s=self.second_moments_s * by.messages,
        )


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
    decision: Decision,
    facts: RoundMeasurements,
    *,
    now: Cost,
    steps: int,
    lossy: bool,
    periods: Sequence[SyncPeriod],
) -> SyncDecision:
    """Choose the sync method for a run of `steps` steps.

    `now`: of a synchronous step with `decision`, as `facts.step_s` with the update of its parameters if it has one.
    Without `lossy` the choice is synchronous training, and the reason says what local updates would save. A period of
    which the run has fewer than four rounds is excluded. The reason names the seconds of a step now and apart, the
    share of each that waits for messages, the extra steps, and what would turn the choice.
    """
    usable = [p for p in periods if _ROUNDS * p.every <= steps]
    best = min(usable, key=lambda p: forecast_apart(p, facts).step_s * (1 + p.dearer), default=None)
    if best is None:
        least = min((p.every for p in periods), default=0)
        enough = f": {_ROUNDS} rounds of {least} steps need {_ROUNDS * least}" if least else ""
        return SyncDecision(None, f"every step: {steps} steps are too few for local updates{enough}")
    line = forecast_apart(best, facts)
    pays_from_s = line.step_s * (1 + best.dearer) / (1 - WORTH) / (1 + decision.dearer)
    at_once, apart = (_waiting(one.step_s, one.exposed_s) for one in (now, line))
    because = f" ({best.because})" if best.because else ""
    if now.step_s < pays_from_s:
        return SyncDecision(
            None,
            f"every step: {at_once}; islands that synchronize every {best.every} steps would take {apart} "
            f"and {100 * best.dearer:.0f}% more steps{because}: local updates are worth it from "
            f"{show_seconds(pays_from_s)} a step on",
        )
    gain = f"{apart} instead of {at_once}, for {100 * best.dearer:.0f}% more steps{because}"
    if not lossy:
        said = f"every step; plan.lossy: true would allow local updates of {best.every} steps: {gain}"
        return SyncDecision(None, said)
    turns = f"; local updates are worth it from {show_seconds(pays_from_s)} a step on"
    said = f"islands synchronize every {best.every} steps: {gain}{turns}"
    return SyncDecision(written_of(best, line.delay, steps), said, line)


def _waiting(step_s: float, exposed_s: float) -> str:
    share = 100 * exposed_s / step_s if step_s else 0.0
    return f"{show_seconds(step_s)} a step ({share:.0f}% of it waits for messages)"


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
    # loss 1.034 of dense's after 2.0 M tokens, one seed (docs/results/links_apart.json)
    SyncPeriod(16, 0.25, because="measured without second moments to average; adamw has them and needs 7%"),
    # 1.013, three seeds, trained weights (docs/results/links_apart_after.json)
    SyncPeriod(16, 0.07, second_moments=16),
)
