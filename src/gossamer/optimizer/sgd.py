"""SGD: steps against the gradient, with momentum.

Paper: Polyak 1964 (momentum); Nesterov 1983; in the form of Sutskever et al., ICML 2013.
Equations, with rate a = lr * lr_scale:
    g <- g + weight_decay w
    m <- momentum m + g
    w <- w - a m             (nesterov: w <- w - a (g + momentum m))
Symbols: w parameter, g gradient, m `momentum` (state; none where momentum is 0), all of one shape and type.
State:   1 tensor per parameter with momentum, else 0.   Work: one pass in torch's fused kernel, no temporaries.
Unlike the paper, as in torch: the rate is outside the momentum, so it may change without rescaling m.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.optimizer import Optimizer, OptimizerState
from gossamer.optimizer._foreach import lists, zeros
from gossamer.spec.errors import bad_input
from gossamer.spec.validate import below_one, not_negative, positive


@dataclass(frozen=True, slots=True, kw_only=True)
class SGD(Optimizer):
    """Stochastic gradient descent; `weight_decay` is added to the gradient of every parameter."""

    lr: float = 0.1
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        positive("lr", self.lr)
        below_one("momentum", self.momentum)
        not_negative("weight_decay", self.weight_decay)
        if self.nesterov and self.momentum == 0:
            raise bad_input(wanted="momentum above 0 with nesterov", got="0", do="set momentum: 0.9", key="momentum")

    @property
    def slots(self) -> tuple[str, ...]:
        return ("momentum",) if self.momentum else ()

    @property
    def is_plain(self) -> bool:
        return self.momentum == 0 and self.weight_decay == 0

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
        for _, group in lists(params, grads, state, self.slots):
            torch._fused_sgd_(
                group.params,
                group.grads,
                group.slots[0] if group.slots else [],
                weight_decay=self.weight_decay,
                momentum=self.momentum,
                lr=self.lr * lr_scale,
                dampening=0.0,
                nesterov=self.nesterov,
                maximize=False,
                is_first_step=False,
            )
