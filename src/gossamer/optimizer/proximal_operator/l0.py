"""L0: the number of elements other than 0 (hard thresholding): small elements become 0, the others stay as they are.

Paper: Blumensath, Davies, J. Fourier Anal. Appl. 2008 (iterative hard thresholding).
Equations: P(x) = strength [x != 0] ;  prox = v if v^2 > 2 step strength, else 0
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.optimizer.proximal_operator import ProximalOperator
from gossamer.spec.validate import positive


@dataclass(frozen=True, slots=True, kw_only=True)
class L0(ProximalOperator):
    """`strength` for each element that is not 0."""

    strength: float = 1e-6

    def __post_init__(self) -> None:
        positive("strength", self.strength)

    def penalty(self, x: Tensor) -> Tensor:
        return self.strength * (x != 0).to(x.dtype)

    def prox(self, v: Tensor, step: float) -> Tensor:
        return torch.where(v.square() > 2 * step * self.strength, v, 0.0)
