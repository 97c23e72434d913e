"""Taid: temporally adaptive interpolated distillation, whose target moves from the student to the teacher.

Equations: D = KL(p_t || q),    p_t = softmax(((1 - t) sg(s) + t z) / T),    q = softmax(s / T)
After a step with loss L, the n-th of `total`:
    d = max(-1, (L_before - L) / (L_before + 1e-15)),    m <- beta m + (1 - beta) d
    t <- min(t_end, max(t_start + (t_end - t_start) n / total, t + alpha sigmoid(m) (1 - t)))
Symbols: z, s logits of teacher and student, sg: no gradient, T temperature. Gradient: dD / d(s / T) = q - p_t; it is 0
at t = 0, and that of the forward KL to the teacher at t = 1. t never falls, and is the same on all ranks: L is the mean
over the valid labels of all of them. State: t, L_before, m, in every checkpoint.
M. Shing et al., TAID: Temporally Adaptive Interpolated Distillation, ICLR 2025, https://arxiv.org/abs/2501.16937.
Unlike the paper: with a `label_weight`, L is the whole loss of the step; a loss that more than doubles counts as one
that doubles, as L is 0 at t = 0, from where any relative increase is infinite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gossamer.loss.distillation import Course, Distillation
from gossamer.loss.kl import forward_kl
from gossamer.spec.errors import bad_input
from gossamer.spec.validate import from_0_to_1


@dataclass(frozen=True, slots=True, kw_only=True)
class Taid(Distillation):
    """Distillation towards an interpolated teacher.

    t_start  where the target begins: 0 is the student itself, 1 the teacher
    t_end    where it ends with the last step
    alpha    the largest step of t beyond the straight line; 0: the straight line alone
    beta     decay of the momentum of the loss's relative decrease

    The other settings are those of `kl`.
    """

    is_adaptive: ClassVar[bool] = True

    teacher: str = ""
    temperature: float = 1.0
    label_weight: float = 0.0
    tile_tokens: int = 256
    top_k: int = 0
    teacher_ranks: tuple[int, ...] = ()
    t_start: float = 0.4
    t_end: float = 1.0
    alpha: float = 5e-4
    beta: float = 0.99

    def __post_init__(self) -> None:
        self.check()
        for name in ("t_start", "t_end", "alpha", "beta"):
            from_0_to_1(name, getattr(self, name))
        if self.t_start > self.t_end:
            got = f"t_start {self.t_start} and t_end {self.t_end}"
            raise bad_input(wanted="t_start of at most t_end", got=got, do="exchange them", key="t_start")

    def first(self) -> Course:
        return Course(t=self.t_start)

    def after(self, course: Course, *, loss: float, done: int, total: int) -> Course:
        before, m, t = course.loss_before, course.momentum, course.t
        line = self.t_start + (self.t_end - self.t_start) * min(1.0, done / total)
        if before is not None:
            m = self.beta * m + (1 - self.beta) * _decrease(before, loss)
            t += self.alpha / (1 + math.exp(-m)) * (1 - t)
        return Course(t=min(self.t_end, max(line, t)), loss_before=loss, momentum=m)

    def divergence(self, student: Tensor, teacher: Tensor, t: float) -> Tensor:
        own = student.detach()
        between = teacher if t == 1 else own if t == 0 else (1 - t) * own + t * teacher  # 0 times -inf is no number
        return forward_kl(between, student)


def _decrease(before: float, loss: float) -> float:
    """Return the relative decrease of the loss, from -1 to 1. Rounding leaves losses near 0 on either side of it."""
    before, loss = max(before, 0.0), max(loss, 0.0)
    return max(-1.0, (before - loss) / (before + 1e-15))
