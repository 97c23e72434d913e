"""Schedule-free SGD: an average of all iterates in place of a learning rate that falls.

Paper: Defazio et al., NeurIPS 2024, arXiv:2405.15682. The reference is the package `schedulefree` (SGDScheduleFree).
Equations, for update t = 1, 2, ... and rate a = lr * lr_scale, g the gradient at y, b = `momentum`:
    d = g + weight_decay y ;   c = t^r a^p / (sum of t^r a^p over all updates),   p = `weight_lr_power`
    y <- (1 - c) y + c z - a (1 - b (1 - c)) d
    z <- z - a d
    x = y + (1 - 1 / b) (z - y)
Symbols: y the parameter, z `base` (state, of its shape), the sum of the weights `weights` (a number).
Evaluation, samples, export and the best checkpoint are of x (`average`); training and checkpoints hold y and z.
State:   1 tensor per parameter, and a copy of the parameters while x is evaluated.   Work: about five passes.
Good when: the length of a run is not known before; rates are 10 to 50 times those of SGD with momentum.   Not for: a
rate that falls, local updates and batch norm, which are refused (see schedule_free_adamw).
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleFreeSGD(ScheduleFree):
    """SGD without a schedule; `momentum`: interpolation of the two points."""

    lr: float = 1.0
    momentum: float = 0.9
    weight_decay: float = 0.0
    decay_1d: bool = False
    r: float = 0.0
    weight_lr_power: float = 2.0

    def __post_init__(self) -> None:
        check(self, "momentum")

    @property
    def interpolation(self) -> float:
        return self.momentum

    @property
    def slots(self) -> tuple[str, ...]:
        return ("base", "weights")

    def init(self, params: Mapping[str, Tensor]) -> OptimizerState:
        return begun(params)

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
            moves = [grad.clone() for grad in group.grads]
            follow(self, group, moves, decays=decays, rate=self.lr * lr_scale, step=step)
