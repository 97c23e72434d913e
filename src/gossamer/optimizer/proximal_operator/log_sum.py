"""Log-sum penalty: the logarithm of the absolute value, from 0 on; the closer to 0, the stronger.

Paper: Candes, Wakin, Boyd, J. Fourier Anal. Appl. 2008. Symbols: l `strength`, t `scale`, s step; odd in v.
Equations: P(x) = l log(1 + |x| / t)
    prox: x = ((|v| - t) + sqrt((|v| + t)^2 - 4 s l)) / 2 where it is real, positive and better than 0; else 0
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.ops.proximal import best_of
from gossamer.optimizer.proximal_operator import ProximalOperator
from gossamer.spec.validate import positive


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSum(ProximalOperator):
    """`strength` times the logarithm of 1 + |x| / `scale`."""

    strength: float = 1e-4
    scale: float = 1e-2

    def __post_init__(self) -> None:
        positive("strength", self.strength)
        positive("scale", self.scale)

    def penalty(self, x: Tensor) -> Tensor:
        return self.strength * torch.log1p(x.abs() / self.scale)

    def prox(self, v: Tensor, step: float) -> Tensor:
        size = v.abs()
        root = ((size + self.scale).square() - 4 * step * self.strength).clamp(min=0).sqrt()
        # Where there is no stationary point, the clamped one is no better than 0 and never taken.
        still = (((size - self.scale) + root) / 2).clamp(min=0)
        return best_of(v, step, self.penalty, [torch.zeros_like(size), still])
