"""OneBitLamb: LAMB that after a warm-up needs nothing but an exact momentum: second moments and ratios stay as they
were, but for what the momentum itself tells of how they would have gone on.

Paper: Li et al., 1-bit LAMB, HiPC 2022, arXiv:2104.06069, algorithm 1.
Equations, for update t = 1, 2, ... and rate a = lr * lr_scale, T = freeze_step:
    t <= T:  Lamb, and of its ratios  c <- b3 c + (1 - b3) phi(|w|) / |u|
    t > T:   m' = b1 m + (1 - b1) g ;   f <- b2 f + (1 - b2) g^2, where f was v at T ;   m <- m'
             h = sqrt(v / (1 - b2^T)) ;   h' = sqrt(f / (1 - b2^t)) ;   u' = (m / (1 - b1^t)) / (h + eps)
             u = u' + weight_decay w ;   k = min(1, |u'| / |u|)
             s = k max((h + eps) / (h' + eps)) + 1 - k, at least `factor_min` and at most `factor_max`, and within
             `factor_threshold` of r ;   r <- s ;   w <- w - a r (c / (1 - b3^T)) u
    where h and h' are at least `floor` times their root mean square over the parameter, and u' = 0 where v = 0
Symbols: w parameter, m `mean`, v `square`, f `fresh` (state, of one shape), c `coefficient`, r `factor` (state, one
number each, r is 1 at first); g gradient: under the exchange `momentum` what the momentum has moved by, over 1 - b1, so
that m is what crossed the wire; (b1, b2) = betas, b3 = coeff_beta; max over the elements of a parameter.
State:   3 tensors and 2 numbers per parameter.   Work: about six passes while t <= T, then about twelve.
Good when: the exchange is {momentum: {inner: {warmup: {steps: T, inner: ...}}}} with beta = b1, error feedback and a
code inside, and train.max_grad_norm is 0. With T beyond the run's end it is Lamb.
Unlike the paper: the floor, as in one_bit_adam; no bias of m, v and c; no common scale for all layers' momenta, as the
code has one for each block; tensors of fewer than two dimensions have c = r = 1 and do not decay, unless `adapt_1d`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.optimizer import OptimizerState
from gossamer.optimizer._adam import Adaptive, check, inverse
from gossamer.optimizer._foreach import Lists, lists, zeros
from gossamer.optimizer.lamb import Lamb
from gossamer.spec.errors import bad_input
from gossamer.spec.validate import below_one, not_negative, positive


@dataclass(frozen=True, slots=True, kw_only=True)
class OneBitLamb(Adaptive):
    """LAMB with a second moment that is frozen after `freeze_step` updates.

    `coeff_beta`: decay of the mean of the trust ratios until then.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.01
    max_coeff: float = 10.0
    adapt_1d: bool = False
    freeze_step: int = 100
    coeff_beta: float = 0.9
    factor_min: float = 0.5
    factor_max: float = 4.0
    factor_threshold: float = 0.1
    floor: float = 0.05

    def __post_init__(self) -> None:
        check(self)
        positive("max_coeff", self.max_coeff)
        positive("freeze_step", self.freeze_step)
        below_one("coeff_beta", self.coeff_beta)
        positive("factor_min", self.factor_min)
        positive("factor_max", self.factor_max)
        not_negative("factor_threshold", self.factor_threshold)
        not_negative("floor", self.floor)
        if self.factor_min > self.factor_max:
            raise bad_input(
                wanted=f"at most factor_max, which is {self.factor_max:g}",
                got=f"{self.factor_min:g}",
                do="lower factor_min or raise factor_max",
                key="factor_min",
            )

    @property
    def counts_each(self) -> bool:
        return False

    @property
    def by_element(self) -> bool:
        return False

    @property
    def slots(self) -> tuple[str, ...]:
        return ("mean", "square", "fresh", "coefficient", "factor")

    def init(self, params: Mapping[str, Tensor]) -> OptimizerState:
        found = zeros(params, self.slots)
        for slots in found.values():
            slots["coefficient"] = slots["mean"].new_zeros(())
            slots["factor"] = slots["mean"].new_ones(())
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
        rate = self.lr * lr_scale
        for adapts, group in lists(params, grads, state, self.slots, apart=lambda p: self.adapt_1d or p.ndim >= 2):
            if step < self.freeze_step:
                self._warm(group, adapts=adapts, rate=rate, step=step)
            else:
                self._frozen(group, adapts=adapts, rate=rate, step=step)

    def _warm(self, group: Lists, *, adapts: bool, rate: float, step: int) -> None:
        _, squares, fresh, coefficients, _ = group.slots
        lamb = Lamb(
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            max_coeff=self.max_coeff,
            adapt_1d=self.adapt_1d,
        )
        found = lamb.move(group, adapts=adapts, rate=rate, step=step)
        torch._foreach_copy_(fresh, squares)
        if found:
            torch._foreach_lerp_(coefficients, found, 1 - self.coeff_beta)

    def _frozen(self, group: Lists, *, adapts: bool, rate: float, step: int) -> None:
        (b1, b2), (means, squares, fresh, coefficients, factors) = self.betas, group.slots
        torch._foreach_lerp_(means, group.grads, 1 - b1)
        torch._foreach_mul_(fresh, b2)
        torch._foreach_addcmul_(fresh, group.grads, group.grads, 1 - b2)
        below = inverse(squares, seen=1 - b2**self.freeze_step, floor=self.floor, eps=self.eps)
        updates = list(torch._foreach_div(means, 1 - b1 ** (step + 1)))
        torch._foreach_mul_(updates, below)
        if adapts:
            now = inverse(fresh, seen=1 - b2 ** (step + 1), floor=self.floor, eps=self.eps)
            adam = torch._foreach_norm(updates)
            torch._foreach_add_(updates, group.params, alpha=self.weight_decay)
            for r, *told in zip(factors, below, now, adam, torch._foreach_norm(updates), strict=True):
                r.copy_(self._factor(r, *told))
            torch._foreach_mul_(updates, factors)
            torch._foreach_mul_(updates, list(torch._foreach_div(coefficients, 1 - self.coeff_beta**self.freeze_step)))
        torch._foreach_add_(group.params, updates, alpha=-rate)

    def _factor(self, before: Tensor, below: Tensor, now: Tensor, adam: Tensor, whole: Tensor) -> Tensor:
        """r, given 1 / (h + eps), 1 / (h' + eps), |u'| and |u|."""
        if not below.numel():
            return before
        ratio = torch.where(below > 0, now / below, 0.0).max()
        part = torch.where(whole > 0, adam / whole, 1.0).clamp(max=1.0)
        found = (part * ratio + 1 - part).clamp(self.factor_min, self.factor_max)
        return found.clamp(before * (1 - self.factor_threshold), before * (1 + self.factor_threshold))
