"""AdamW: steps of the mean gradient over its root mean square, with weight decay beside the gradient.

Paper: Loshchilov, Hutter, ICLR 2019, arXiv:1711.05101; Kingma, Ba, ICLR 2015, arXiv:1412.6980.
Equations, for update t = 1, 2, ... and rate a = lr * lr_scale:
    w <- w (1 - a * weight_decay)
    m <- b1 m + (1 - b1) g ;  v <- b2 v + (1 - b2) g^2
    w <- w - a (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
Symbols: w parameter, g gradient, m `mean` and v `square` (state), all of one shape and type; (b1, b2) = betas.
State:   2 tensors per parameter.   Work: one pass over w, g, m, v in torch's fused kernel, no temporaries.
Not for: parameters in half types alone: v moves by 1 part in 1000, which bf16 cannot hold (see Master).
Unlike torch: tensors with fewer than two dimensions (norms, biases) do not decay unless `decay_1d`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.optimizer import OptimizerState
from gossamer.optimizer._adam import Adaptive, check
from gossamer.optimizer._foreach import lists


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW(Adaptive):
    """Adam with decoupled weight decay; `decay_1d`: whether vectors and scalars decay too."""

    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    decay_1d: bool = False

    def __post_init__(self) -> None:
        check(self)

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
        for decays, group in lists(params, grads, state, self.slots, apart=self.decays):
            means, squares = group.slots
            count = torch.full((), float(step + 1), device=group.params[0].device)
            torch._fused_adamw_(
                group.params,
                group.grads,
                means,
                squares,
                [],
                [count] * len(group.params),
                amsgrad=False,
                lr=self.lr * lr_scale,
                beta1=self.betas[0],
                beta2=self.betas[1],
                weight_decay=self.weight_decay if decays else 0.0,
                eps=self.eps,
                maximize=False,
            )

    def decays(self, param: Tensor) -> bool:
        """Return whether weight decay applies to this parameter."""
        return self.decay_1d or param.ndim >= 2
