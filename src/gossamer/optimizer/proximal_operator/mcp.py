"""MCP: as steep as L1 at 0, ever flatter, constant far from it, so that large elements are not moved.

Paper: Zhang, Annals of Statistics 2010 (minimax concave penalty). Symbols: l `strength`, g `gamma`, s step; odd in v.
Equations: P(x) = l x - x^2 / (2 g) up to g l ;  g l^2 / 2 beyond
    for s < g:  |v| <= s l: 0 ;  |v| <= g l: (|v| - s l) / (1 - s / g) ;  else v
    for larger s the curved piece is concave, and the better of its ends is taken (hard thresholding).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.ops.proximal import best_of, with_sign_of
from gossamer.optimizer.proximal_operator import ProximalOperator
from gossamer.spec.validate import positive


@dataclass(frozen=True, slots=True, kw_only=True)
class Mcp(ProximalOperator):
    """`strength`: the slope at 0; `gamma`: the penalty is constant from gamma * strength on."""

    strength: float = 1e-4
    gamma: float = 3.0

    def __post_init__(self) -> None:
        positive("strength", self.strength)
        positive("gamma", self.gamma)

    def penalty(self, x: Tensor) -> Tensor:
        size, slope, gamma = x.abs(), self.strength, self.gamma
        near = slope * size - size.square() / (2 * gamma)
        return torch.where(size <= gamma * slope, near, gamma * slope**2 / 2)

    def prox(self, v: Tensor, step: float) -> Tensor:
        size, slope, gamma = v.abs(), self.strength, self.gamma
        if step < gamma:
            near = with_sign_of(v, (size - step * slope).clamp(min=0) / (1 - step / gamma))
            return torch.where(size <= gamma * slope, near, v)
        return best_of(v, step, self.penalty, [torch.zeros_like(size), size.clamp(min=gamma * slope)])
