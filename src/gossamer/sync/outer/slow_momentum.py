"""SlowMomentum: momentum over rounds of D / (sum of the inner learning rates), so a changing rate does not rescale it.

Equations:
    u <- beta u + D / g ;   x <- x - lr g u
Symbols: x global parameters; D mean pseudo-gradient; g the sum of the learning rates of the round's steps; u `momentum`
(state); beta = momentum.
State:   1 tensor as large as the parameters.   Work: two passes.   A round at rate 0 moves nothing.
Paper:   Wang et al., SlowMo, ICLR 2020, arXiv 1910.00643, algorithm 1. There g is the one rate of the round; the sum
is the same up to the unit of u where rates do not change inside a round, and right where they do (warm-up).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.spec.validate import below_one, positive
from gossamer.sync.outer import OuterOptimizer, OuterState, OuterStep


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowMomentum(OuterOptimizer):
    """An outer optimizer with momentum in units of the learning rate: momentum = 0 and lr = 1 is the plain average."""

    lr: float = 1.0
    momentum: float = 0.7

    def __post_init__(self) -> None:
        positive("lr", self.lr)
        below_one("momentum", self.momentum)

    @property
    def slots(self) -> tuple[str, ...]:
        return ("momentum",)

    @torch.no_grad()
    def step(self, anchor: Sequence[Tensor], mean: Sequence[Tensor], state: OuterState, at: OuterStep) -> None:
        if at.rates <= 0:
            return
        for x, d, u in zip(anchor, mean, state["momentum"], strict=True):
            u.mul_(self.momentum).add_(d, alpha=1 / at.rates)
            x.add_(u, alpha=-self.lr * at.rates)
