"""L1: the sum of absolute values, which sets small elements to 0 and moves all others towards it (soft thresholding).

Paper: Tibshirani, JRSS B 1996; Daubechies et al., CPAM 2004 (iterative thresholding).
Equations: P(x) = strength |x| ;  prox = v - clip(v, -step strength, step strength)
Not for:   large weights that are to stay as they are: they shrink as much as small ones (see scad, mcp).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gossamer.ops.proximal import soft_threshold
from gossamer.optimizer.proximal_operator import ProximalOperator
from gossamer.spec.validate import positive


@dataclass(frozen=True, slots=True, kw_only=True)
class L1(ProximalOperator):
    """The absolute value times `strength`."""

    strength: float = 1e-4

    def __post_init__(self) -> None:
        positive("strength", self.strength)

    def penalty(self, x: Tensor) -> Tensor:
        return self.strength * x.abs()

    def prox(self, v: Tensor, step: float) -> Tensor:
        return soft_threshold(v, step * self.strength)
