"""L2: half the squared norm, which shrinks all elements by the same factor and sets none to 0 (implicit weight decay).

Equations: P(x) = strength x^2 / 2 ;  prox = v / (1 + step strength)
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gossamer.optimizer.proximal_operator import ProximalOperator
from gossamer.spec.validate import positive


@dataclass(frozen=True, slots=True, kw_only=True)
class L2(ProximalOperator):
    """Half the square times `strength`."""

    strength: float = 1e-4

    def __post_init__(self) -> None:
        positive("strength", self.strength)

    def penalty(self, x: Tensor) -> Tensor:
        return self.strength * x.square() / 2

    def prox(self, v: Tensor, step: float) -> Tensor:
        return v / (1 + step * self.strength)
