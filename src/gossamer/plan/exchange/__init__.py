"""Choose the exchange of each parameter and link: the solver of `plan.exchange: auto`.

With `plan.sync: auto` it also chooses between synchronous training and local updates (`sync_period`). Pure functions of
measured numbers (`StepMeasurements`, `RoundMeasurements`).

Buckets that are ready early overlap with the backward pass and stay exact; the later a bucket is ready, the stronger
the compression it may get. The solver chooses the bucket at which each candidate begins. It minimizes the seconds of a
step, increased by a penalty for the part of the gradient that compression defers.
"""

from gossamer.plan.exchange.candidates import CANDIDATES, Candidate, across_islands
from gossamer.plan.exchange.choose import Decision, choose
from gossamer.plan.exchange.measurements import BucketMeasurements, Option, StepMeasurements, check_finite, wire_seconds
from gossamer.plan.exchange.step_tasks import cost_of_step, tasks_of_step, waited_for
from gossamer.plan.exchange.sync_period import (
    PERIODS,
    LocalUpdateEstimate,
    RoundMeasurements,
    SyncDecision,
    SyncPeriod,
    choose_period,
    forecast_apart,
    written_of,
)

__all__ = [
    "CANDIDATES",
    "PERIODS",
    "BucketMeasurements",
    "Candidate",
    "Decision",
    "StepMeasurements",
    "Option",
    "LocalUpdateEstimate",
    "SyncPeriod",
    "RoundMeasurements",
    "SyncDecision",
    "across_islands",
    "check_finite",
    "choose",
    "choose_period",
    "cost_of_step",
    "forecast_apart",
    "tasks_of_step",
    "waited_for",
    "wire_seconds",
    "written_of",
]
