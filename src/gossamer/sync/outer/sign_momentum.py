"""SignMomentum: outer Lion, the sign of a momentum over rounds; every coordinate moves by the same amount.

Equations:
    D' = D / g ;   u = b1 m + (1 - b1) D'
    x <- x - lr r (S(u) + weight_decay x)
    m <- b2 m + (1 - b2) D'
    S(u) = sign(u), or with `randomized`: +1 with probability 1/2 + u / (2 B), else -1;  B = max |u| of its buffer
Symbols: x global parameters; D mean pseudo-gradient; g sum, r mean of the learning rates of the round's steps; m
`momentum` (state).
State:   1 tensor as large as the parameters.   Work: four passes. The wire carries D in full: the sign comes after it.
Paper:   Yu et al., Distributed Sign Momentum with Local Steps, arXiv 2411.17866, algorithm 1 (b1 .95, b2 .98 there).
Unlike the paper: g is the sum of the rates, so that warm-up inside a round does not stretch D'. Where u is zero (rows
without a gradient) nothing moves but by weight_decay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.comm.random_key import key_at
from gossamer.spec.validate import below_one, not_negative, positive
from gossamer.sync.outer import OuterOptimizer, OuterState, OuterStep


@dataclass(frozen=True, slots=True, kw_only=True)
class SignMomentum(OuterOptimizer):
    """A sign-based outer optimizer with momentum.

    With one step per round, SGD as the inner optimizer and no decay it is Lion on the mean gradient, at the rate lr r.
    """

    lr: float = 1.0
    b1: float = 0.95
    b2: float = 0.98
    weight_decay: float = 0.0
    randomized: bool = False

    def __post_init__(self) -> None:
        positive("lr", self.lr)
        below_one("b1", self.b1)
        below_one("b2", self.b2)
        not_negative("weight_decay", self.weight_decay)

    @property
    def slots(self) -> tuple[str, ...]:
        return ("momentum",)

    @torch.no_grad()
    def step(self, anchor: Sequence[Tensor], mean: Sequence[Tensor], state: OuterState, at: OuterStep) -> None:
        if at.rates <= 0:
            return
        size = self.lr * at.rate
        for index, (x, d, m) in enumerate(zip(anchor, mean, state["momentum"], strict=True)):
            u = torch.lerp(d / at.rates, m, self.b1)
            m.mul_(self.b2).add_(d, alpha=(1 - self.b2) / at.rates)
            signs = self._drawn(u, (*at.key, index)) if self.randomized else u.sign()
            x.mul_(1 - size * self.weight_decay).add_(signs, alpha=-size)

    @staticmethod
    def _drawn(u: Tensor, key: tuple[int, ...]) -> Tensor:
        most = u.abs().max()
        if not most:
            return torch.zeros_like(u)
        seed = torch.Generator(u.device).manual_seed(key_at(key, 0).shared)
        up = torch.rand(u.shape, generator=seed, device=u.device) < 0.5 + u / (2 * most)
        return torch.where(u == 0, 0.0, torch.where(up, 1.0, -1.0))
