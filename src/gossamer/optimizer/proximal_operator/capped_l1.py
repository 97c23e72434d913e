"""Capped L1: the absolute value up to a cap and constant beyond, so that large elements are not moved.

Paper: Zhang, JMLR 2010 (multi-stage convex relaxation). Symbols: l `strength`, t `cap`, s step; odd in v.
Equations: P(x) = l min(|x|, t) ;  prox: the better of max(|v|, t) and min(max(|v| - s l, 0), t)
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gossamer.ops.proximal import best_of
from gossamer.optimizer.proximal_operator import ProximalOperator
from gossamer.spec.validate import positive


@dataclass(frozen=True, slots=True, kw_only=True)
class CappedL1(ProximalOperator):
    """`strength` times the absolute value, at most `cap` of it."""

    strength: float = 1e-4
    cap: float = 1e-2

    def __post_init__(self) -> None:
        positive("strength", self.strength)
        positive("cap", self.cap)

    def penalty(self, x: Tensor) -> Tensor:
        return self.strength * x.abs().clamp(max=self.cap)

    def prox(self, v: Tensor, step: float) -> Tensor:
        size = v.abs()
        near = (size - step * self.strength).clamp(0, self.cap)
        return best_of(v, step, self.penalty, [near, size.clamp(min=self.cap)])
