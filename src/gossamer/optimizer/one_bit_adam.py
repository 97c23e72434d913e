"""OneBitAdam: Adam whose second moment stays as it was after a warm-up, so that only the momentum has to be exact.

Paper: Tang et al., 1-bit Adam, ICML 2021, arXiv:2102.02888, algorithm 1.
Equations, for update t = 1, 2, ... and rate a = lr * lr_scale, T = freeze_step:
    w <- w (1 - a weight_decay)
    m <- b1 m + (1 - b1) g ;  v <- b2 v + (1 - b2) g^2  while t <= T, then no more
    w <- w - a (m / (1 - b1^t)) / (h + eps),   h = sqrt(v / (1 - b2^min(t, T)))
    where t > T: h is at least `floor` times the root mean square of h over the parameter, and what has v = 0 stays
Symbols: w parameter, g gradient, m `mean` and v `square` (state), all of one shape; (b1, b2) = betas.
State:   2 tensors per parameter.   Work: one fused pass while t <= T, then about six.
Good when: the exchange is {momentum: {inner: {warmup: {steps: T, inner: ...}}}} with beta = b1, error feedback and a
code inside, and train.max_grad_norm is 0: m is then what the code made of it. With T beyond the run's end it is AdamW.
Unlike the paper: the floor. A second moment frozen while a row was hardly ever used makes its steps explode.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.optimizer import OptimizerState
from gossamer.optimizer._adam import Adaptive, check, frozen, inverse
from gossamer.optimizer._foreach import lists
from gossamer.optimizer.adamw import AdamW
from gossamer.spec.validate import not_negative


@dataclass(frozen=True, slots=True, kw_only=True)
class OneBitAdam(Adaptive):
    """Adam with a second moment that is frozen after `freeze_step` updates (15 to 25% of a run in the paper)."""

    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    decay_1d: bool = False
    freeze_step: int = 100
    floor: float = 0.05

    def __post_init__(self) -> None:
        check(self)
        not_negative("freeze_step", self.freeze_step)
        not_negative("floor", self.floor)

    @property
    def counts_each(self) -> bool:
        return False

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
        if step < self.freeze_step:
            self._warm.update(params, grads, state, lr_scale=lr_scale, step=step)
            return
        rate = self.lr * lr_scale
        for decays, group in lists(params, grads, state, self.slots, apart=lambda p: self.decay_1d or p.ndim >= 2):
            seen = 1 - self.betas[1] ** self.freeze_step if self.freeze_step else 1.0
            below = inverse(group.slots[1], seen=seen, floor=self.floor, eps=self.eps)
            frozen(self, group, below, seen=1 - self.betas[0] ** (step + 1), decays=decays, rate=rate)

    @property
    def _warm(self) -> AdamW:
        return AdamW(lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay, decay_1d=self.decay_1d)
