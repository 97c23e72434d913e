"""Schedule-free AdamW: an average of all iterates in place of a learning rate that falls.

Paper: Defazio et al., NeurIPS 2024, arXiv:2405.15682. The reference is the package `schedulefree` (AdamWScheduleFree).
Equations, for update t = 1, 2, ... and rate a = lr * lr_scale, g the gradient at y, b1, b2 = betas:
    v <- b2 v + (1 - b2) g^2 ;   d = g / (sqrt(v / (1 - b2^t)) + eps) + weight_decay y
    c = t^r a^p / (sum of t^r a^p over all updates),   p = `weight_lr_power`
    y <- (1 - c) y + c z - a (1 - b1 (1 - c)) d
    z <- z - a d
    x = y + (1 - 1 / b1) (z - y)
Symbols: y the parameter, z `base`, v `square` (state, of its shape), the sum of the weights `weights` (a number).
Evaluation, samples, export and the best checkpoint are of x (`average`); training and checkpoints hold y and z.
State:   2 tensors per parameter, and a copy of the parameters while x is evaluated.   Work: about eight passes.
Good when: the length of a run is not known before.   Not for: a rate that falls (refused), local updates (refused),
batch norm (refused: its running statistics are those of y). Rates are 1 to 10 times AdamW's with a schedule.
Unlike the package: warm-up is that of train.lr_schedule; tensors of fewer than two dimensions do not decay unless
`decay_1d`; a weight has the rate of its update, which never falls, in place of the largest rate so far.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.optimizer import OptimizerState
from gossamer.optimizer._foreach import lists
from gossamer.optimizer._schedule_free import ScheduleFree, begun, check, follow
from gossamer.spec.validate import below_one, positive


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleFreeAdamW(ScheduleFree):
    """AdamW without a schedule; `betas`: interpolation of the two points, and decay of the second moment."""

    lr: float = 2.5e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decay_1d: bool = False
    r: float = 0.0
    weight_lr_power: float = 2.0

    def __post_init__(self) -> None:
        check(self, "betas")
        below_one("betas", self.betas[1])
        positive("eps", self.eps)

    @property
    def interpolation(self) -> float:
        return self.betas[0]

    @property
    def slots(self) -> tuple[str, ...]:
        return ("square", "base", "weights")

    def init(self, params: Mapping[str, Tensor]) -> OptimizerState:
        return begun(params, ("square",))

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
        b2 = self.betas[1]
        for decays, group in lists(params, grads, state, self.slots, apart=self.decays):
            squares = group.slots[0]
            torch._foreach_mul_(squares, b2)
            torch._foreach_addcmul_(squares, group.grads, group.grads, 1 - b2)
            below = list(torch._foreach_div(squares, 1 - b2 ** (step + 1)))
            torch._foreach_sqrt_(below)
            torch._foreach_add_(below, self.eps)
            moves = list(torch._foreach_div(group.grads, below))
            follow(self, group, moves, decays=decays, rate=self.lr * lr_scale, step=step)
