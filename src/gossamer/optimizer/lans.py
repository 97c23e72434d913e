"""Lans: LAMB on gradients of norm one, with a Nesterov step: the update rule of CLAN.

Paper: Zheng et al., arXiv:2006.13484, algorithm 2.
Equations, for update t = 1, 2, ... and rate a = lr * lr_scale:
    g <- g / |g|
    m <- b1 m + (1 - b1) g ;  v <- b2 v + (1 - b2) g^2 ;  h = sqrt(v / (1 - b2^t)) + eps
    r = (m / (1 - b1^t)) / h + weight_decay w ;   c = g / h + weight_decay w
    w <- w - a phi(|w|) (b1 r / |r| + (1 - b1) c / |c|),   phi(z) = min(z, max_coeff);  phi = 1, and no division, where
    w, r or c is zero
Symbols: w parameter, g gradient, m `mean` and v `square` (state), all of one shape; (b1, b2) = betas; |.| is the norm
of a parameter. The gradient is the one that all ranks agreed on: its norm is that of what was decoded.
State:   2 tensors per parameter.   Work: about ten passes.
Unlike the paper: tensors with fewer than two dimensions do not decay and keep the length of their own step, unless
`adapt_1d`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.optimizer import OptimizerState
from gossamer.optimizer._adam import Adaptive, check, moments
from gossamer.optimizer._foreach import lists
from gossamer.optimizer._trust_ratio import ratios, unit
from gossamer.spec.validate import positive


@dataclass(frozen=True, slots=True, kw_only=True)
class Lans(Adaptive):
    """LAMB on normalized gradients.

    `max_coeff`: limit of a parameter's norm in its ratio; `adapt_1d`: trust ratios and weight decay for 1-D parameters
    too.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.01
    max_coeff: float = 10.0
    adapt_1d: bool = False

    def __post_init__(self) -> None:
        check(self)
        positive("max_coeff", self.max_coeff)

    @property
    def by_element(self) -> bool:
        return False

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
        b1, _ = self.betas
        rate = self.lr * lr_scale
        for adapts, group in lists(params, grads, state, self.slots, apart=lambda p: self.adapt_1d or p.ndim >= 2):
            units = unit(group.grads)
            slow, below = moments(self, group, units, step)
            torch._foreach_div_(slow, below)
            torch._foreach_div_(units, below)
            for part, moves in ((b1, slow), (1 - b1, units)):
                if adapts:
                    torch._foreach_add_(moves, group.params, alpha=self.weight_decay)
                    torch._foreach_mul_(moves, ratios(group.params, moves, largest=self.max_coeff))
                torch._foreach_mul_(moves, part)
            torch._foreach_add_(slow, units)
            torch._foreach_add_(group.params, slow, alpha=-rate)
