"""Arithmetic shared by the schedule-free optimizers: the points y, z and x, and the weights of the average."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from gossamer.optimizer import Optimizer, OptimizerState
from gossamer.optimizer._foreach import Lists, zeros
from gossamer.spec.errors import bad_input
from gossamer.spec.validate import below_one, not_negative, positive


class ScheduleFree(Optimizer):
    """A schedule-free optimizer: parameters are the point y where gradients are taken, `base` is z, x their average."""

    __slots__ = ()

    @property
    @abstractmethod
    def interpolation(self) -> float:
        """Return b in y = (1 - b) z + b x."""

    @property
    @abstractmethod
    def weight_decay(self) -> float:
        """Return the rate of weight decay."""

    @property
    @abstractmethod
    def decay_1d(self) -> bool:
        """Return whether vectors and scalars decay too."""

    @property
    @abstractmethod
    def r(self) -> float:
        """Return the power of the update's number in its weight."""

    @property
    @abstractmethod
    def weight_lr_power(self) -> float:
        """Return the power of the learning rate in the weight of an update."""

    @property
    def has_average(self) -> bool:
        return True

    @torch.no_grad()
    def average(self, params: Mapping[str, Tensor], state: OptimizerState) -> Mapping[str, Tensor]:
        weight = 1 - 1 / self.interpolation
        return {name: param.detach().lerp(state[name]["base"], weight) for name, param in params.items()}

    def decays(self, param: Tensor) -> bool:
        """Return whether weight decay applies to this parameter."""
        return self.decay_1d or param.ndim >= 2


def check(rule: ScheduleFree, name: str) -> None:
    """Raise BadInput for settings out of their limits. `name`: the field of the interpolation."""
    positive("lr", rule.lr)
    below_one(name, rule.interpolation)
    if rule.interpolation == 0:
        raise bad_input(
            wanted="an interpolation above 0, as the averaged point is computed from the trained one",
            got="0",
            do="use 0.9, or 0.95 to 0.98 for long runs",
            key=name,
        )
    not_negative("weight_decay", rule.weight_decay)
    not_negative("r", rule.r)
    not_negative("weight_lr_power", rule.weight_lr_power)


def begun(params: Mapping[str, Tensor], others: tuple[str, ...] = ()) -> OptimizerState:
    """Return the states before the first update: z is where the parameters are, no update has a weight yet."""
    state = zeros(params, others)
    for name, param in params.items():
        state[name]["base"] = param.detach().clone(memory_format=torch.contiguous_format)
        # In float32 a sum of many equal weights would stop growing.
        state[name]["weights"] = torch.zeros((), dtype=torch.float64, device=param.device)
    return state


def follow(rule: ScheduleFree, group: Lists, moves: list[Tensor], *, decays: bool, rate: float, step: int) -> None:
    """Move the points of a group by `moves`, which are overwritten; slots end in `base` and `weights`."""
    bases, sums = group.slots[-2:]
    b = rule.interpolation
    weight = (step + 1) ** rule.r * rate**rule.weight_lr_power
    torch._foreach_add_(sums, weight)
    shares = [weight / total if total else 0.0 for total in torch.stack(sums).tolist()]
    if decays and rule.weight_decay:
        torch._foreach_add_(moves, group.params, alpha=rule.weight_decay)
    for param, base, share in zip(group.params, bases, shares, strict=True):
        param.lerp_(base, share)
    torch._foreach_add_(bases, moves, alpha=-rate)
    torch._foreach_mul_(moves, [rate * (b * (1 - share) - 1) for share in shares])
    torch._foreach_add_(group.params, moves)
