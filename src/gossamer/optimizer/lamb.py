"""Lamb: Adam with the update of each parameter scaled by its trust ratio |w| / |u|, for very large batches.

Paper: You et al., ICLR 2020, arXiv:1904.00962, algorithm 2.
Equations, for update t = 1, 2, ... and rate a = lr * lr_scale:
    m <- b1 m + (1 - b1) g ;  v <- b2 v + (1 - b2) g^2
    u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay w
    w <- w - a (phi(|w|) / |u|) u,   phi(z) = min(z, max_coeff);  a ratio of 1 where w or u is zero
Symbols: w parameter, g gradient, m `mean` and v `square` (state), all of one shape; (b1, b2) = betas; |.| is the norm
of a parameter.
State:   2 tensors per parameter.   Work: about six passes.
Unlike the paper: tensors with fewer than two dimensions do not decay and have a ratio of 1, unless `adapt_1d`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.optimizer import OptimizerState
from gossamer.optimizer._adam import Adaptive, check, moments
from gossamer.optimizer._foreach import Lists, lists
from gossamer.optimizer._trust_ratio import ratios
from gossamer.spec.validate import positive


@dataclass(frozen=True, slots=True, kw_only=True)
class Lamb(Adaptive):
    """Adam with layer-wise trust ratios.

    `max_coeff`: limit of a parameter's norm in its ratio; `adapt_1d`: trust ratios for 1-D parameters too.
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
        rate = self.lr * lr_scale
        for adapts, group in lists(params, grads, state, self.slots, apart=lambda p: self.adapt_1d or p.ndim >= 2):
            self.move(group, adapts=adapts, rate=rate, step=step)

    def move(self, group: Lists, *, adapts: bool, rate: float, step: int) -> list[Tensor]:
        """Update a group in place, whose first two slots are the moments.

        Return phi(|w|) / |u| of each parameter where the group `adapts`.
        """
        updates, below = moments(self, group, group.grads, step)
        torch._foreach_div_(updates, below)
        found: list[Tensor] = []
        if adapts:
            torch._foreach_add_(updates, group.params, alpha=self.weight_decay)
            found = ratios(group.params, updates, largest=self.max_coeff)
            torch._foreach_mul_(updates, found)
        torch._foreach_add_(group.params, updates, alpha=-rate)
        return found
