"""A learning rate that rises, stays, and falls at the end: a run can be prolonged from any point before the fall.

Paper: Hu et al. 2024 (MiniCPM), arXiv:2404.06395; shapes of the fall: Haegele et al. 2024, arXiv:2405.18392.
Equation: over the last d steps, f = m + (1 - m) (1 - x) for linear, m + (1 - m) (1 - sqrt(x)) for sqrt,
with m = min_lr_factor and x = (step - (steps - d) + 1) / (d + 1): the last update is still above m.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from gossamer.optimizer.lr_schedule import LRSchedule
from gossamer.optimizer.lr_schedule._span import demand_span, rise, span
from gossamer.spec.errors import bad_input
from gossamer.spec.validate import below_one


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupStableDecay(LRSchedule):
    """A warmup-stable-decay learning-rate schedule.

    `warmup` and `decay`: fractions of the run (below 1) or numbers of steps; `min_lr_factor`: the factor it decays
    towards.
    """

    warmup: float = 0.02
    decay: float = 0.2
    min_lr_factor: float = 0.0
    decay_type: Literal["linear", "sqrt"] = "sqrt"

    def __post_init__(self) -> None:
        demand_span("warmup", self.warmup)
        demand_span("decay", self.decay)
        below_one("min_lr_factor", self.min_lr_factor)
        if self.warmup < 1 and self.decay < 1 and self.warmup + self.decay > 1:
            raise bad_input(
                wanted="warmup + decay of at most 1 (the whole run)",
                got=f"{self.warmup + self.decay:g}",
                do="lower warmup or decay",
                key="decay",
            )

    @property
    def never_falls(self) -> bool:
        return self.decay == 0

    def factor(self, step: int, steps: int) -> float:
        warmup, decay = span("warmup", self.warmup, steps), span("decay", self.decay, steps)
        if max(self.warmup, self.decay) >= 1 and warmup + decay > steps:
            raise bad_input(
                wanted=f"warmup and decay within the run of {steps} steps",
                got=f"{warmup} + {decay} steps",
                do="lower warmup or decay, or raise train.steps",
                key="decay",
            )
        left = min(1.0, max(0.0, (step - (steps - decay) + 1) / (decay + 1)))
        fall = 1 - (left if self.decay_type == "linear" else math.sqrt(left))
        return min(rise(step, warmup), self.min_lr_factor + (1 - self.min_lr_factor) * fall)
