"""What Eva and its variants share: rank-one preconditioning, one clip for all layers, and momentum."""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.optimizer import Optimizer, OptimizerState
from gossamer.optimizer._patterns import check_patterns
from gossamer.spec.errors import BadInput
from gossamer.spec.validate import below_one, not_negative, positive

# The layer before a softmax has too many outputs for the mean of their gradients to say much; tables are not linear.
PLAIN = ("embed", r"\bw[tp]e\b", "head", "router", r"\bgate\.weight$", r"\bscore\b")


class EvaRule(Optimizer):
    """An optimizer whose matrices are preconditioned by vectors, all of them under one clip."""

    __slots__ = ()

    @property
    @abstractmethod
    def momentum(self) -> float:
        """Return the momentum of the preconditioned gradients."""

    @property
    @abstractmethod
    def damping(self) -> float:
        """Return gamma, which is added to the curvature."""

    @property
    @abstractmethod
    def kl_clip(self) -> float:
        """Return kappa, the most that an update may change the model; 0: updates as long as the gradient."""

    @property
    @abstractmethod
    def decay(self) -> float:
        """Return xi, the weight of a step's vectors in their running averages."""

    @property
    @abstractmethod
    def weight_decay(self) -> float:
        """Return the rate of weight decay, which is added to the update before the momentum."""

    @property
    @abstractmethod
    def plain(self) -> tuple[str, ...]:
        """Return regular expressions of names of parameters that follow their gradient."""

    @abstractmethod
    def sides(self, shape: tuple[int, ...]) -> dict[str, int]:
        """Return the vectors kept for a matrix of this shape: slot -> length."""

    @abstractmethod
    def moves(self, params: Mapping[str, Tensor], grads: Mapping[str, Tensor], state: OptimizerState) -> list[Move]:
        """Return the preconditioned gradients of this update, one for each layer that has vectors."""

    @property
    def slots(self) -> tuple[str, ...]:
        return (*self.sides((1, 1)), "seen", *(("momentum",) if self.momentum else ()))

    @property
    def by_element(self) -> bool:
        return False

    @property
    def by_parameter(self) -> bool:
        return False

    @property
    def has_one_clip(self) -> bool:
        return True

    @property
    def counts_each(self) -> bool:
        return False  # all layers move in one call

    def check(self, names: Collection[str]) -> None:
        if names and all(self._is_plain(name) for name in names):
            raise BadInput(
                "every trained parameter has one of the names in `plain`, so nothing would be preconditioned: shorten "
                "the list, or choose sgd",
                key="train.optimizer",
            )

    def init(self, params: Mapping[str, Tensor]) -> OptimizerState:
        found: OptimizerState = {}
        for name, param in params.items():
            kept = self.sides(tuple(param.shape)) if self.may_be_layer(name, param) else {}
            found[name] = {slot: param.new_zeros(length).detach() for slot, length in kept.items()}
            if kept:
                found[name]["seen"] = param.new_zeros(()).detach()
            if self.momentum:
                found[name]["momentum"] = torch.zeros_like(param, memory_format=torch.contiguous_format).detach()
        return found

    def may_be_layer(self, name: str, param: Tensor) -> bool:
        """Return whether a parameter can be preconditioned: a matrix (or kernel) whose name is not `plain`."""
        return param.ndim >= 2 and bool(param.numel()) and not self._is_plain(name)

    def _is_plain(self, name: str) -> bool:
        return any(re.search(pattern, name) for pattern in self.plain)

    def averaged(self, slots: dict[str, Tensor], vectors: Mapping[str, Tensor]) -> None:
        """Take a step's vectors into the running averages in `slots`; the first ones as they are."""
        new = torch.where(slots["seen"] > 0, self.decay, 1.0)
        for slot, vector in vectors.items():
            slots[slot].lerp_(vector.to(slots[slot].dtype), new.to(slots[slot].dtype))
        slots["seen"].fill_(1.0)

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
        rate, found = self.lr * lr_scale, self.moves(params, grads, state)
        scale = self._clip(found, rate)
        steps = {name: grad.to(params[name].dtype) for name, grad in grads.items()}
        for move in found:
            for name, one in move.parts(params):
                steps[name] = (one * scale).to(params[name].dtype)
        for name, moved in steps.items():
            param = params[name].detach()
            if self.weight_decay:
                moved = moved + self.weight_decay * param
            if self.momentum:
                moved = state[name]["momentum"].mul_(self.momentum).add_(moved)
            param.add_(moved, alpha=-rate)

    def _clip(self, moves: list[Move], rate: float) -> float:
        """Return nu, the factor on all preconditioned gradients."""
        if not moves:
            return 1.0
        told = [torch.stack([(m.update * m.gradient).sum(), _square(m.gradient), _square(m.update)]) for m in moves]
        inner, gradients, updates = torch.stack([one.double() for one in told]).sum(0).tolist()
        if self.kl_clip == 0:
            return math.sqrt(gradients / updates) if updates > 0 else 1.0
        change = rate * rate * inner
        return min(1.0, math.sqrt(self.kl_clip / change)) if change > 0 else 1.0


@dataclass(frozen=True, slots=True)
class Move:
    """The gradient (outputs, inputs) of a layer and its preconditioned form, with the bias as a last column.

    `bias`: the name of the bias; "" where the layer has none.
    """

    weight: str
    bias: str
    gradient: Tensor
    update: Tensor

    def parts(self, params: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
        """Return the preconditioned gradient by parameter."""
        if not self.bias:
            return [(self.weight, self.update.view(params[self.weight].shape))]
        weight, bias = self.update[:, :-1], self.update[:, -1]
        return [(self.weight, weight.reshape(params[self.weight].shape)), (self.bias, bias)]


def check(rule: EvaRule) -> None:
    """Raise BadInput for settings out of their limits."""
    positive("lr", rule.lr)
    below_one("momentum", rule.momentum)
    positive("damping", rule.damping)
    not_negative("kl_clip", rule.kl_clip)
    if not 0 < rule.decay <= 1:
        raise BadInput(f"wanted a weight of new vectors above 0 and up to 1, got {rule.decay:g}", key="decay")
    not_negative("weight_decay", rule.weight_decay)
    check_patterns(rule.plain, "plain")


def _square(tensor: Tensor) -> Tensor:
    return tensor.square().sum()


def seen_of(names: list[str], state: OptimizerState) -> list[str]:
    """Return those of `names` whose layers have vectors, with one wait for the device."""
    if not names:
        return []
    told = torch.stack([state[name]["seen"].float() for name in names]).tolist()
    return [name for name, is_seen in zip(names, told, strict=True) if is_seen]


def with_bias(name: str, grads: Mapping[str, Tensor]) -> tuple[str, Tensor]:
    """Return the name of a layer's bias and the gradient of weight and bias as one float32 matrix."""
    bias = f"{name.removesuffix('weight')}bias" if name.endswith("weight") else ""
    gradient = wide(grads[name]).contiguous().flatten(1)
    if bias not in grads:
        return "", gradient
    return bias, torch.cat([gradient, wide(grads[bias])[:, None]], 1)


def wide(tensor: Tensor) -> Tensor:
    """Return a tensor in float32, or as it is in float64."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def rank_one(gradient: Tensor, output: Tensor, input: Tensor, damping: float) -> Tensor:
    """Return (b b^T (x) a a^T + gamma I)^-1 g for a gradient (outputs, inputs), by Sherman and Morrison."""
    output, input = output.to(gradient.dtype), input.to(gradient.dtype)
    size = output.square().sum() * input.square().sum() + damping
    part = torch.dot(output, gradient @ input) / size
    return torch.addr(gradient, output * part, input, alpha=-1.0) / damping
