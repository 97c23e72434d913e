"""How often islands come together: what `plan.sync: auto` means, with `plan.lossy: true`.

Gradients that meet at every step (the best exchange `choose` knows) against islands that train apart and meet every
`SyncPeriod.every` steps, fragment by fragment in four bits, with a delay that hides what is under way. The seconds of a
step, made dearer by the steps more that it takes to the same loss, decide. Pure, as `choose` is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gossamer.plan.exchange.choose import WORTH, Decision
from gossamer.spec.method_config import Written
from gossamer.spec.units import show_seconds

FRAGMENTS = 4  # as in Streaming DiLoCo: a quarter of the peak rate


@dataclass(frozen=True, slots=True)
class SyncPeriod:
    """Islands that meet every so many steps. `dearer`: the part more of steps that the same loss takes, as measured
    (benchmarks/links_apart.py). `second_moments`: every so many rounds these meet too, where the update rule has any
    that can; then the anchor goes to the islands' mean, else by Nesterov's momentum.
    """

    every: int
    dearer: float
    second_moments: int = 0


@dataclass(frozen=True, slots=True)
class RoundMeasurements:
    """`step_s`: of an island by itself, with the exchange inside of it. Of one round: `fragments_s`, how long each
    fragment is on its way between islands; `cpu_s`, encoding; `stolen`, the part of that which steps lose.
    `second_moments_s`: how long all of them are on their way, when they are.
    """

    step_s: float
    fragments_s: tuple[float, ...]
    cpu_s: float = 0.0
    stolen: float = 0.0
    second_moments_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LocalUpdateEstimate:
    """Forecast of islands apart: seconds of a mean step, how many wait for the wire, and the delay."""

    step_s: float
    exposed_s: float
    delay: int


@dataclass(frozen=True, slots=True)
class SyncDecision:
    """The choice. `sync` is None where gradients should meet at every step; `reason`: one line for people."""

    sync: Written | None
    reason: str
    forecast: LocalUpdateEstimate | None = None


def choose_period(
    decision: Decision, facts: RoundMeasurements, *, steps: int, lossy: bool, periods: Sequence[SyncPeriod]
) -> SyncDecision:
    """For a run of so many steps. Without `lossy` all gradients meet at every step; the reason says what it would gain.
    A period that the run has not four rounds for is none.
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
    """Steps are as long as an island's own, unless the wire has not done with a round when the next one begins.

    The delay is the shortest that hides the longest fragment, and one step for what comes late.
    """
    own = facts.step_s + facts.stolen * facts.cpu_s / period.every
    beside = facts.second_moments_s / period.second_moments if period.second_moments else 0.0
    step_s = max(own, (sum(facts.fragments_s) + beside) / period.every)
    longest = max(facts.fragments_s, default=0.0)
    delay = min(period.every - 1, math.ceil(longest / step_s) + 1)
    late = sum(max(0.0, one - delay * step_s) for one in facts.fragments_s) / period.every
    return LocalUpdateEstimate(step_s + late, step_s + late - own, delay)


def written_of(period: SyncPeriod, delay: int, steps: int) -> Written:
    """What the losses were measured with, but for the delay: a run of so many steps parts after a tenth of them."""
    with_own: dict[str, Any] = {"mix": 0.5, "outer": {"nesterov": {"lr": 0.4}}}
    with_common: dict[str, Any] = {"carry": True, "outer": "average", "second_moments": period.second_moments}
    return {
        "diloco": {
            "every": period.every,
            "fragments": FRAGMENTS,
            "delay": delay,
            "start": steps // 10,
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
