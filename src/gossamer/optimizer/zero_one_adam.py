"""ZeroOneAdam: Adam whose second moment follows only gradients that all ranks share, and whose momentum becomes what
came of the steps whose gradients they did not share.

Paper: Lu et al., Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam, ICLR 2023,
arXiv:2202.06009, algorithm 1.
Equations, for rate a = lr * lr_scale, h = sqrt(v / w2):
    in every step:              w <- w (1 - a weight_decay) ;   m <- b1 m + (1 - b1) g ;   w1 <- b1 w1 + 1 - b1
    where all gradients meet:   v <- b2 v + (1 - b2) g^2 ;   w2 <- b2 w2 + 1 - b2
    in every step:              w <- w - a (m / w1) / (h + eps)
    where islands meet, A the sum of their rates since they parted, D the mean of what they moved, decay not counted:
                                m <- D (h + eps) / A ;   w1 <- 1
    in steps of an island's own, and where islands meet: h at least `floor` times its root mean square over the
    parameter, and what has v = 0 stays
Symbols: w parameter, g gradient, m `mean` and v `square` (state, of one shape), the sums of their weights w1 and w2
(state, one number each, 0 until islands part: 1 - b^t); (b1, b2) = betas. So all of it is the same on all ranks where
islands meet, whatever each of them has skipped.
State:   2 tensors and 2 numbers per parameter.   Work: one fused pass until islands part, then about six.
Good when: plan.sync is `zero_one`; with every_step it is AdamW. Clipping acts on the gradients, an island's on its own.
Unlike the paper: the floor (a row that was hardly ever used would explode); decay is beside the gradient, and not in m;
no bias of m and v; where all gradients meet, m follows their mean, as in the authors' code; m is 0 after a round in
which nobody has moved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.optimizer import OptimizerState
from gossamer.optimizer._adam import Adaptive, check, frozen, inverse
from gossamer.optimizer._foreach import Lists, lists, zeros
from gossamer.optimizer.adamw import AdamW
from gossamer.spec.validate import not_negative

_WEIGHTS = ("mean_weight", "square_weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroOneAdam(Adaptive):
    """Adam for plan.sync `zero_one`, which decides in which steps all ranks average gradients and when rounds end."""

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
    def counts_each(self) -> bool:
        return False

    @property
    def by_parameter(self) -> bool:
        return False  # its rounds of signs are not known to be the same where states are sharded

    @property
    def by_element(self) -> bool:
        return False

    @property
    def can_start_local(self) -> bool:
        return False

    @property
    def slots(self) -> tuple[str, ...]:
        return ("mean", "square", *_WEIGHTS)

    def init(self, params: Mapping[str, Tensor]) -> OptimizerState:
        found = zeros(params, ("mean", "square"))
        for name, param in params.items():
            found[name] |= {weight: torch.zeros((), device=param.device) for weight in _WEIGHTS}
        return found

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
        if not self._has_parted(state):
            self._together.update(params, grads, state, lr_scale=lr_scale, step=step)
            return
        b2 = self.betas[1]
        for decays, group in lists(params, grads, state, self.slots, apart=self._decays):
            _, squares, _, weights = group.slots
            torch._foreach_mul_(squares, b2)
            torch._foreach_addcmul_(squares, group.grads, group.grads, 1 - b2)
            torch._foreach_mul_(weights, b2)
            torch._foreach_add_(weights, 1 - b2)
            self._move(group, decays=decays, rate=self.lr * lr_scale, floor=0.0)

    @torch.no_grad()
    def update_apart(
        self,
        params: Mapping[str, Tensor],
        grads: Mapping[str, Tensor],
        state: OptimizerState,
        *,
        lr_scale: float,
        step: int,
    ) -> None:
        if not self._has_parted(state):
            for slots in state.values():
                for weight, beta in zip(_WEIGHTS, self.betas, strict=True):
                    slots[weight].fill_(1 - beta**step)
        for decays, group in lists(params, grads, state, self.slots, apart=self._decays):
            self._move(group, decays=decays, rate=self.lr * lr_scale, floor=self.floor)

    @torch.no_grad()
    def meet(
        self, params: Mapping[str, Tensor], moved: Mapping[str, Tensor], state: OptimizerState, *, rates: float
    ) -> None:
        for decays, group in lists(params, moved, state, self.slots, apart=self._decays):
            means, squares, seen, weights = group.slots
            below = inverse(squares, seen=weights, floor=self.floor, eps=self.eps)
            for mean, w, d, one in zip(means, group.params, group.grads, below, strict=True):
                mean.zero_()
                if rates > 0:
                    own = d / rates - self.weight_decay * (w + d) if decays else d / rates
                    mean.copy_(torch.where(one > 0, own / one, 0.0))
            for weight in seen:
                weight.fill_(1.0)

    def _move(self, group: Lists, *, decays: bool, rate: float, floor: float) -> None:
        _, squares, seen, weights = group.slots
        below = inverse(squares, seen=weights, floor=floor, eps=self.eps)
        torch._foreach_mul_(seen, self.betas[0])
        torch._foreach_add_(seen, 1 - self.betas[0])
        frozen(self, group, below, seen=seen, decays=decays, rate=rate)

    @staticmethod
    def _has_parted(state: OptimizerState) -> bool:
        return any(bool(slots["mean_weight"]) for slots in [*state.values()][:1])

    @property
    def _together(self) -> AdamW:
        return AdamW(lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay, decay_1d=self.decay_1d)

    def _decays(self, param: Tensor) -> bool:
        return self.decay_1d or param.ndim >= 2
