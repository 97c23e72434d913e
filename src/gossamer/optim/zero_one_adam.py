"""ZeroOneAdam: Adam whose second moment follows only gradients that all ranks share, and whose momentum becomes what
came of the steps whose gradients they did not share.

Paper: Lu et al., Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam, ICLR 2023,
arXiv:2202.06009, algorithm 1.
Equations, for update t = 1, 2, ... and rate a = lr * lr_scale:
    where all gradients meet:  AdamW
    in steps of an island's own:
        w <- w (1 - a weight_decay) ;   m <- b1 m + (1 - b1) g ;   v <- v (1 - b2^t) / (1 - b2^(t-1))
        w <- w - a (m / (1 - b1^t)) / (h + eps),   h = sqrt(v / (1 - b2^t))
        where h is at least `floor` times its root mean square over the parameter, and what has v = 0 stays
    where islands meet, A the sum of their rates since they parted, D the mean of what they moved, decay not counted:
        m <- (1 - b1^t) D (h + eps) / A
Symbols: w parameter, g gradient, m `mean` and v `square` (state), all of one shape; (b1, b2) = betas. So h stays as it
is in steps of one's own, and is the same on all ranks, as m is where they meet.
State:   2 tensors per parameter.   Work: one fused pass where all gradients meet, else about six.
Good when: plan.sync is `zero_one`; with every_step it is AdamW. Clipping acts on the gradients, an island's on its own.
Unlike the paper: the floor (a row that was hardly ever used would explode); decay is beside the gradient, and not in m;
no bias of m and v; where all gradients meet, m follows their mean, as in the authors' code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.optim import Rule, State
from gossamer.optim._adam import check, frozen, inverse
from gossamer.optim._demand import not_negative
from gossamer.optim._lists import lists, zeros
from gossamer.optim.adamw import AdamW


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroOneAdam(Rule):
    """Its schedule is that of plan.sync: when all gradients meet, and when what has been moved does."""

    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    decay_1d: bool = False
    floor: float = 0.05

    def __post_init__(self) -> None:
        check(self)
        not_negative("floor", self.floor)

    @property
    def by_element(self) -> bool:
        return False

    @property
    def begins_apart(self) -> bool:
        return False

    @property
    def slots(self) -> tuple[str, ...]:
        return ("mean", "square")

    def init(self, params: Mapping[str, Tensor]) -> State:
        return zeros(params, self.slots)

    def update(
        self, params: Mapping[str, Tensor], grads: Mapping[str, Tensor], state: State, *, lr_scale: float, step: int
    ) -> None:
        rule = AdamW(lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay, decay_1d=self.decay_1d)
        rule.update(params, grads, state, lr_scale=lr_scale, step=step)

    @torch.no_grad()
    def update_apart(
        self, params: Mapping[str, Tensor], grads: Mapping[str, Tensor], state: State, *, lr_scale: float, step: int
    ) -> None:
        seen, before = self._seen(step + 1), self._seen(step)
        for decays, group in lists(params, grads, state, self.slots, apart=self._decays):
            if before and seen != before:
                torch._foreach_mul_(group.slots[1], seen / before)
            below = inverse(group.slots[1], seen=seen, floor=self.floor, eps=self.eps)
            frozen(self, group, below, decays=decays, rate=self.lr * lr_scale, step=step)

    @torch.no_grad()
    def meet(
        self, params: Mapping[str, Tensor], moved: Mapping[str, Tensor], state: State, *, rates: float, step: int
    ) -> None:
        if rates <= 0:
            return
        for decays, group in lists(params, moved, state, self.slots, apart=self._decays):
            below = inverse(group.slots[1], seen=self._seen(step), floor=self.floor, eps=self.eps)
            for mean, w, d, one in zip(group.slots[0], group.params, group.grads, below, strict=True):
                own = d - rates * self.weight_decay * (w + d) if decays else d
                mean.copy_(torch.where(one > 0, own / one, 0.0)).mul_((1 - self.betas[0] ** step) / rates)

    def _decays(self, param: Tensor) -> bool:
        return self.decay_1d or param.ndim >= 2

    def _seen(self, updates: int) -> float:
        """The sum of a second moment's weights."""
        return 1 - self.betas[1] ** updates
