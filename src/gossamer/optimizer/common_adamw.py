"""CommonAdamW: AdamW on islands that train apart, which divide by what they all know of the squares of gradients.

Equations (island i, its part p_i of all samples, rate a = lr * lr_scale), for update t = 1, 2, ...:
    w <- w (1 - a weight_decay) ;   m <- b1 m + (1 - b1) g ;   v <- b2 v + (1 - b2) p_i g^2
    w <- w - a (m / (1 - b1^t)) / (sqrt(h) + eps)
    h = max(c, p_i v / (1 - b2^t)) where c > 0, else v / (1 - b2^t)
    where islands have brought them together:   c <- sum_i p_i v_i / (1 - b2^t)
Where all gradients meet it is AdamW, and c is its v / (1 - b2^t).
Symbols: w parameter, g gradient of this island, m `mean`, v `square`, c `common` (state, of one shape and type).
Why: with AdamW an island divides by the noise of its own small batch, p_i v is what the mean gradient of all has where
noise rules, and an island's large gradient is in its m and in its v: the mean of such steps is shorter than the step of
the mean, by up to the number of islands for what is seldom seen. With one c for all, steps are linear in the gradients,
and their mean is AdamW's step of the mean gradient, with a second moment that is some rounds old.
The floor p_i v: what nobody had seen when c was made would explode.
State:   3 tensors per parameter.   Work: some eight passes.
Sources: rules that share states among islands now and then: Iacob et al., DES-LOC, arXiv 2505.22549; a second moment
that rests between meetings: Lu et al., 0/1 Adam, arXiv 2202.06009. The scale p_i and the floor are Gossamer's.
Good when: plan.sync has `average_second_moments_every`.   Not for: many islands and gradients that are hardly noise:
there a step may be longer than AdamW's, by up to the root of their number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeGuard

import torch
from torch import Tensor

from gossamer.optimizer import Optimizer, OptimizerState
from gossamer.optimizer._adam import frozen
from gossamer.optimizer._foreach import lists, zeros
from gossamer.optimizer.adamw import AdamW
from gossamer.spec.errors import bad_input
from gossamer.spec.validate import a_part


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonAdamW(Optimizer):
    """AdamW with second moments that islands average. `part`: this island's share of all samples; 1 is plain AdamW."""

    inner: AdamW = field(default_factory=AdamW)
    part: float = 1.0

    def __post_init__(self) -> None:
        a_part("part", self.part)

    @staticmethod
    def around(rule: Optimizer, part: float) -> CommonAdamW:
        """Wrap an optimizer; raise BadInput unless it is AdamW."""
        if not CommonAdamW.serves(rule):
            raise bad_input(
                wanted="adamw, whose second moments can be averaged across islands",
                got=type(rule).__name__,
                do="set train.optimizer to adamw, or remove average_second_moments_every",
                key="plan.sync",
            )
        return CommonAdamW(inner=rule, part=part)

    @staticmethod
    def serves(rule: Optimizer) -> TypeGuard[AdamW]:
        """Return whether islands can average the second moments of this optimizer."""
        return isinstance(rule, AdamW)

    @property
    def made_by(self) -> str:
        return self.inner.made_by

    @property
    def counts_each(self) -> bool:
        return False

    @property
    def lr(self) -> float:
        return self.inner.lr

    @property
    def slots(self) -> tuple[str, ...]:
        return (*self.inner.slots, "common")

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
        self.inner.update(params, grads, state, lr_scale=lr_scale, step=step)
        self.learn(self.second_moments(state, step=step + 1), state)

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
        if self.part == 1:  # no other island exists: `common` would never be refreshed
            self.update(params, grads, state, lr_scale=lr_scale, step=step)
            return
        b1, b2 = self.inner.betas
        for decays, group in lists(params, grads, state, self.slots, apart=self.inner.decays):
            _, squares, commons = group.slots
            torch._foreach_mul_(squares, b2)
            torch._foreach_addcmul_(squares, group.grads, group.grads, self.part * (1 - b2))
            below = []
            for own, common in zip(torch._foreach_div(squares, 1 - b2 ** (step + 1)), commons, strict=True):
                known = torch.where(common > 0, torch.maximum(common, own * self.part), own)
                below.append(known.sqrt_().add_(self.inner.eps).reciprocal_())
            rate = self.lr * lr_scale
            frozen(self.inner, group, below, seen=1 - b1 ** (step + 1), decays=decays, rate=rate)

    @torch.no_grad()
    def second_moments(self, state: OptimizerState, *, step: int) -> Mapping[str, Tensor]:
        seen = 1 - self.inner.betas[1] ** step if step else 1.0  # an island may have made no update
        return {name: slots["square"] / seen for name, slots in state.items()}

    @torch.no_grad()
    def learn(self, squares: Mapping[str, Tensor], state: OptimizerState) -> None:
        for name, square in squares.items():
            state[name]["common"].copy_(square)
