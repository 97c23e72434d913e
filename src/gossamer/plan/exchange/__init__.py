"""Which exchange for which parameters, on which link: what `plan.exchange: auto` means. And, with `plan.sync: auto`,
whether gradients meet at every step at all (`period`).

A pure function of measured numbers (`Facts`). Buckets that are ready early hide under the backward pass and stay exact;
the later one is ready, the harsher the candidate it may get. Where each candidate begins is chosen so that a step's
seconds, made dearer by the part of the gradient that it leaves for later, are fewest.
"""

from gossamer.plan.exchange.candidates import CANDIDATES, Candidate, across_islands
from gossamer.plan.exchange.choose import Decision, choose
from gossamer.plan.exchange.measurements import BucketMeasurements, Option, StepMeasurements, check_finite, wire_seconds
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
from gossamer.plan.exchange.timeline import Timeline, timeline, waited_for

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
    "Timeline",
    "SyncDecision",
    "across_islands",
    "check_finite",
    "choose",
    "choose_period",
    "forecast_apart",
    "timeline",
    "waited_for",
    "wire_seconds",
    "written_of",
]
