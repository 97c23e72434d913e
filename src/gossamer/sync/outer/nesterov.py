"""Nesterov: the mean pseudo-gradient as a gradient of SGD with Nesterov momentum; the outer optimizer of DiLoCo.

Equations:
    m <- mu m + D ;   x <- x - lr (D + mu m)
Symbols: x global parameters; D mean pseudo-gradient; m `momentum` (state), zero at first; mu = momentum.
State:   1 tensor as large as the parameters.   Work: two passes.
Paper:   Douillard et al., DiLoCo, arXiv 2311.08105, algorithm 1; lr 0.7, mu 0.9 there, lr 0.4 when streaming.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.spec.validate import below_one, positive
from gossamer.sync.outer import OuterOptimizer, OuterState, OuterStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Nesterov(OuterOptimizer):
    """An outer optimizer as torch.optim.SGD(nesterov=True); with momentum = 0, plain SGD at the outer learning rate."""

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        positive("lr", self.lr)
        below_one("momentum", self.momentum)

    @property
    def slots(self) -> tuple[str, ...]:
        return ("momentum",)

    @torch.no_grad()
    def step(self, anchor: Sequence[Tensor], mean: Sequence[Tensor], state: OuterState, at: OuterStep) -> None:
        for x, d, m in zip(anchor, mean, state["momentum"], strict=True):
            m.mul_(self.momentum).add_(d)
            x.add_(d, alpha=-self.lr).add_(m, alpha=-self.lr * self.momentum)
