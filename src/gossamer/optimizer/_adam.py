"""Arithmetic shared by the Adam-like optimizers: limits of their settings, and the updates of both moments."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from gossamer.optimizer import Optimizer, OptimizerState
from gossamer.optimizer._foreach import Lists, zeros
from gossamer.spec.validate import below_one, not_negative, positive


class Adaptive(Optimizer):
    """An Adam-like optimizer: its settings, and both moments of every parameter as its state."""

    __slots__ = ()

    @property
    @abstractmethod
    def betas(self) -> tuple[float, float]:
        """Return the decay of the first and of the second moment."""

    @property
    @abstractmethod
    def eps(self) -> float:
        """Return the number that is added to the root of the second moment."""

    @property
    @abstractmethod
    def weight_decay(self) -> float:
        """Return the rate of weight decay."""

    @property
    def slots(self) -> tuple[str, ...]:
        return ("mean", "square")

    def init(self, params: Mapping[str, Tensor]) -> OptimizerState:
        return zeros(params, self.slots)


def check(rule: Adaptive) -> None:
    """Raise BadInput for settings out of their limits."""
    positive("lr", rule.lr)
    for beta in rule.betas:
        below_one("betas", beta)
    positive("eps", rule.eps)
    not_negative("weight_decay", rule.weight_decay)


def moments(rule: Adaptive, group: Lists, grads: list[Tensor], step: int) -> tuple[list[Tensor], list[Tensor]]:
    """Update both moments (the slots `mean` and `square`) by `grads` and return their bias-corrected values.

    These are m / (1 - b1^t) and sqrt(v / (1 - b2^t)) + eps, t = step + 1, as new tensors.
    """
    b1, b2 = rule.betas
    means, squares = group.slots[:2]
    torch._foreach_lerp_(means, grads, 1 - b1)
    torch._foreach_mul_(squares, b2)
    torch._foreach_addcmul_(squares, grads, grads, 1 - b2)
    below = list(torch._foreach_div(squares, 1 - b2 ** (step + 1)))
    torch._foreach_sqrt_(below)
    torch._foreach_add_(below, rule.eps)
    return list(torch._foreach_div(means, 1 - b1 ** (step + 1))), below


def frozen(
    rule: Adaptive, group: Lists, below: list[Tensor], *, seen: float | list[Tensor], decays: bool, rate: float
) -> None:
    """Update parameters as AdamW does, with frozen second moments: `below` (see `inverse`) is their inverse root.

    `seen`: the sum of the first moments' weights.
    """
    b1, _ = rule.betas
    means = group.slots[0]
    torch._foreach_lerp_(means, group.grads, 1 - b1)
    if decays and rule.weight_decay:
        torch._foreach_mul_(group.params, 1 - rate * rule.weight_decay)
    moves = list(torch._foreach_div(means, seen))
    torch._foreach_mul_(moves, below)
    torch._foreach_add_(group.params, moves, alpha=-rate)


def inverse(squares: list[Tensor], *, seen: float | list[Tensor], floor: float, eps: float) -> list[Tensor]:
    """Return 1 / (h + eps), h = sqrt(v / seen), of second moments `squares` that no longer follow the gradients.

    h is at least `floor` times its root mean square over the parameter; the result is 0 where v = 0. `seen`: the sum of
    the second moments' weights.
    """
    found = []
    for square in torch._foreach_div(squares, seen):
        h = square.sqrt()
        least = floor * h.square().mean().sqrt() if h.numel() else 0.0
        found.append(torch.where(h > 0, 1 / (h.clamp(min=least) + eps), torch.zeros_like(h)))
    return found
