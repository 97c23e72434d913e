"""Choose the exchange of each parameter and link: the solver of `plan.exchange: auto`.

With `plan.sync: auto` it also chooses between synchronous training and local updates (`sync_period`). Pure functions of
measured numbers (`StepMeasurements`, `RoundMeasurements`).

Buckets that are ready early overlap with the backward pass and stay exact; the later a bucket is ready, the stronger
the compression it may get. The solver chooses the size of the buckets, the candidate of each, and the order in which
their messages are started. Of all choices about as fast as the fastest it takes the one that loses least.
"""

from gossamer.plan.exchange.calibration import Calibration, StepTimes
from gossamer.plan.exchange.candidates import CANDIDATES, Candidate, across_islands, alike_anywhere
from gossamer.plan.exchange.choose import Decision, choose, choose_uniform
from gossamer.plan.exchange.measurements import (
    BucketMeasurements,
    MessagePrice,
    Option,
    PricedMessage,
    StepMeasurements,
    check_finite,
    priced,
    wire_seconds,
)
from gossamer.plan.exchange.send_order import SendSchedule, schedule
from gossamer.plan.exchange.step_search import Mixture
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
    "Calibration",
    "Candidate",
    "Decision",
    "StepMeasurements",
    "StepTimes",
    "MessagePrice",
    "Mixture",
    "Option",
    "PricedMessage",
    "SendSchedule",
    "priced",
    "schedule",
    "LocalUpdateEstimate",
    "SyncPeriod",
    "RoundMeasurements",
    "SyncDecision",
    "across_islands",
    "alike_anywhere",
    "check_finite",
    "choose",
    "choose_period",
    "choose_uniform",
    "cost_of_step",
    "forecast_apart",
    "tasks_of_step",
    "waited_for",
    "wire_seconds",
    "written_of",
]
