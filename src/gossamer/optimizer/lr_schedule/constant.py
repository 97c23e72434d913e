"""A constant learning rate, after an optional warm-up."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.optimizer.lr_schedule import LRSchedule
from gossamer.optimizer.lr_schedule._span import demand_span, rise, span


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant(LRSchedule):
    """A constant learning-rate schedule. `warmup`: a fraction of the run (below 1) or a number of steps."""

    warmup: float = 0.0

    def __post_init__(self) -> None:
        demand_span("warmup", self.warmup)

    @property
    def never_falls(self) -> bool:
        return True

    def factor(self, step: int, steps: int) -> float:
        return rise(step, span("warmup", self.warmup, steps))
