"""Lars: SGD with momentum, each layer's step as long as the layer is large.

Paper: You, Gitman, Ginsburg, arXiv:1708.03888, algorithm 1.
Equations, with rate a = lr * lr_scale:
    g <- g + weight_decay w
    m <- momentum m + (trust |w| / |g|) a g ;   w <- w - m          a factor of 1 where w or g is zero
Symbols: w parameter, g gradient, m `momentum` (state), all of one shape; |.| is the norm of a parameter.
State:   1 tensor per parameter.   Work: about four passes.   As in the paper, the rate is inside the momentum.
Unlike the paper: tensors with fewer than two dimensions do not decay and have a ratio of 1, unless `adapt_1d`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.optimizer import Optimizer, OptimizerState
from gossamer.optimizer._foreach import lists, zeros
from gossamer.optimizer._trust_ratio import ratios
from gossamer.spec.validate import below_one, not_negative, positive


@dataclass(frozen=True, slots=True, kw_only=True)
class Lars(Optimizer):
    """SGD with momentum and layer-wise trust ratios.

    `trust_coefficient`: trust coefficient, a layer's update as a fraction of its norm; `adapt_1d`: also for norms and
    biases.
    """

    lr: float = 1.0
    momentum: float = 0.9
    trust_coefficient: float = 1e-3
    weight_decay: float = 5e-4
    adapt_1d: bool = False

    def __post_init__(self) -> None:
        positive("lr", self.lr)
        below_one("momentum", self.momentum)
        positive("trust_coefficient", self.trust_coefficient)
        not_negative("weight_decay", self.weight_decay)

    @property
    def by_element(self) -> bool:
        return False

    @property
    def slots(self) -> tuple[str, ...]:
        return ("momentum",)

    def init(self, params: Mapping[str, Tensor]) -> OptimizerState:
        return zeros(params, self.slots)

    @torch.no_grad()
    def update(
        self,
        params: Mapping[str, Tensor],
        grads: Mapping[str, Tensor],
        state: OptimizerState,
        *,
        lr_scale: float,
        step: int,
    ) -> None:
        rate = self.lr * lr_scale
        for adapts, group in lists(params, grads, state, self.slots, apart=lambda p: self.adapt_1d or p.ndim >= 2):
            (momenta,) = group.slots
            moves = [g.clone() for g in group.grads]
            if adapts:
                torch._foreach_add_(moves, group.params, alpha=self.weight_decay)
                torch._foreach_mul_(moves, ratios(group.params, moves, largest=math.inf, trust=self.trust_coefficient))
            torch._foreach_mul_(momenta, self.momentum)
            torch._foreach_add_(momenta, moves, alpha=rate)
            torch._foreach_sub_(group.params, momenta)
