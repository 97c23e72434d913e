"""The work of one rank in a step, as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gossamer.run.batches import MicroBatch
from gossamer.sync import StepContext


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The work of one rank in a step: the step's context, its micro-batches by number, their counts of valid labels."""

    window: StepContext
    pieces: Mapping[int, MicroBatch]
    weights: Mapping[int, float]
