"""StaleMomentum: scales a late pseudo-gradient down, the more the global parameters have moved since it was computed.

Equations (round t; the pseudo-gradient that arrives now is the one of round t - 1):
    L = 1 + gap |x_t - x_{t-1}| / |D|
    m <- mu m + D / L ;   m <- min(max(m, -clip), clip) ;   x_{t+1} = x_t - lr m
Symbols: x global parameters; D mean pseudo-gradient from x_{t-1}; L staleness gap; mu = momentum; m `momentum`,
x_{t-1} `before` (state). The clip is skipped where clip = 0.
State:   2 tensors as large as the parameters.   Work: four passes.
Paper:   Sun et al., CO2, ICLR 2024, arXiv 2401.16265: staleness gap penalty and outer momentum clipping. The exact
form of L is ours: the distance in units of what a round moves. Its published code clips nothing and has a constant L.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.ops.norm import global_norm_squared
from gossamer.spec.validate import below_one, not_negative, positive
from gossamer.sync.outer import OuterOptimizer, OuterState, OuterStep


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleMomentum(OuterOptimizer):
    """An outer optimizer with momentum for pseudo-gradients that are one round old.

    `gap`: weight of the staleness penalty, 0 for none; `clip`: largest entry of the momentum, 0 for no limit.
    """

    lr: float = 1.0
    momentum: float = 0.5
    gap: float = 1.0
    clip: float = 0.0

    def __post_init__(self) -> None:
        positive("lr", self.lr)
        below_one("momentum", self.momentum)
        not_negative("gap", self.gap)
        not_negative("clip", self.clip)

    @property
    def slots(self) -> tuple[str, ...]:
        return ("before", "momentum")

    @torch.no_grad()
    def step(self, anchor: Sequence[Tensor], mean: Sequence[Tensor], state: OuterState, at: OuterStep) -> None:
        trust = 1 / self._penalty(anchor, mean, state, at)
        for x, d, m, before in zip(anchor, mean, state["momentum"], state["before"], strict=True):
            m.mul_(self.momentum).add_(d, alpha=trust)
            if self.clip:
                m.clamp_(-self.clip, self.clip)
            before.copy_(x)
            x.add_(m, alpha=-self.lr)

    def _penalty(self, anchor: Sequence[Tensor], mean: Sequence[Tensor], state: OuterState, at: OuterStep) -> float:
        moved = float(global_norm_squared(list(mean)))
        if not self.gap or not moved or at.number == 0:  # the anchor does not move before the first
            return 1.0
        went = global_norm_squared([x - before for x, before in zip(anchor, state["before"], strict=True)])
        return 1.0 + self.gap * math.sqrt(float(went) / moved)
