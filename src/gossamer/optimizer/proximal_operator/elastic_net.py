"""Elastic net: L1 and half the squared norm together, which keeps correlated elements together.

Paper: Zou, Hastie, JRSS B 2005.
Equations: P(x) = strength |x| + ridge x^2 / 2 ;  prox = (v - clip(v, -step strength, step strength)) / (1 + step ridge)
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gossamer.ops.proximal import soft_threshold
from gossamer.optimizer.proximal_operator import ProximalOperator
from gossamer.spec.validate import positive


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticNet(ProximalOperator):
    """The absolute value times `strength`, and half the square times `ridge`."""

    strength: float = 1e-4
    ridge: float = 1e-4

    def __post_init__(self) -> None:
        positive("strength", self.strength)
        positive("ridge", self.ridge)

    def penalty(self, x: Tensor) -> Tensor:
        return self.strength * x.abs() + self.ridge * x.square() / 2

    def prox(self, v: Tensor, step: float) -> Tensor:
        return soft_threshold(v, step * self.strength) / (1 + step * self.ridge)
