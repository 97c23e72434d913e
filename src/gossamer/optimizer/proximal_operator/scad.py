"""SCAD: L1 near 0, constant far from it, so that large elements are not moved (smoothly clipped absolute deviation).

Paper: Fan, Li, JASA 2001. Symbols: l `strength`, a `shape`, s step, for x >= 0; odd in v.
Equations: P(x) = l x up to l ;  (2 a l x - x^2 - l^2) / (2 (a - 1)) up to a l ;  (a + 1) l^2 / 2 beyond
    for s < a - 1:  |v| <= l (1 + s): soft threshold by s l ;  |v| <= a l: ((a - 1) |v| - a l s) / (a - 1 - s) ;  else v
    for larger s the middle piece is concave, and the best of its ends is taken.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.ops.proximal import best_of, soft_threshold, with_sign_of
from gossamer.optimizer.proximal_operator import ProximalOperator
from gossamer.spec.errors import bad_input
from gossamer.spec.validate import positive


@dataclass(frozen=True, slots=True, kw_only=True)
class Scad(ProximalOperator):
    """`strength`: the slope at 0; `shape` (above 2): the penalty is constant from shape * strength on."""

    strength: float = 1e-4
    shape: float = 3.7

    def __post_init__(self) -> None:
        positive("strength", self.strength)
        if not 2 < self.shape < float("inf"):
            do = "leave it at 3.7, the value of the paper"
            raise bad_input(wanted="a finite number above 2", got=f"{self.shape:g}", do=do, key="shape")

    def penalty(self, x: Tensor) -> Tensor:
        size, slope, a = x.abs(), self.strength, self.shape
        middle = (2 * a * slope * size - size.square() - slope**2) / (2 * (a - 1))
        far = torch.where(size <= a * slope, middle, (a + 1) * slope**2 / 2)
        return torch.where(size <= slope, slope * size, far)

    def prox(self, v: Tensor, step: float) -> Tensor:
        size, slope, a = v.abs(), self.strength, self.shape
        if step < a - 1:
            middle = with_sign_of(v, ((a - 1) * size - a * slope * step) / (a - 1 - step))
            return torch.where(
                size <= slope * (1 + step),
                soft_threshold(v, step * slope),
                torch.where(size <= a * slope, middle, v),
            )
        near = (size - step * slope).clamp(0, slope)
        return best_of(v, step, self.penalty, [near, size.clamp(min=a * slope)])
