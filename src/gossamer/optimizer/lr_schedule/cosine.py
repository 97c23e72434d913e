"""A learning rate that falls along half a cosine, after a warm-up.

Paper: Loshchilov, Hutter, ICLR 2017, arXiv:1608.03983 (one period, no restart).
Equation: f = m + (1 - m) (1 + cos(pi x)) / 2 with m = min_lr_factor and x = (step - w) / (steps - w), after w steps
of warm-up.
The last update (step = steps - 1) is still above m: none is wasted on a rate of 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gossamer.optimizer.lr_schedule import LRSchedule
from gossamer.optimizer.lr_schedule._span import demand_span, rise, span
from gossamer.spec.validate import below_one


@dataclass(frozen=True, slots=True, kw_only=True)
class Cosine(LRSchedule):
    """A cosine learning-rate schedule.

    `warmup`: a fraction of the run (below 1) or a number of steps; `min_lr_factor`: the factor it decays towards.
    """

    warmup: float = 0.02
    min_lr_factor: float = 0.0

    def __post_init__(self) -> None:
        demand_span("warmup", self.warmup)
        below_one("min_lr_factor", self.min_lr_factor)

    def factor(self, step: int, steps: int) -> float:
        warmup = span("warmup", self.warmup, steps)
        if step < warmup:
            return rise(step, warmup)
        gone = min(1.0, (step - warmup) / (steps - warmup))
        return self.min_lr_factor + (1 - self.min_lr_factor) * 0.5 * (1 + math.cos(math.pi * gone))
