"""Magnitude-invariant hypernetworks: a network whose weights depend on a number in [0, 1] (Gonzalez Ortiz et al. 2023).

Paper: Gonzalez Ortiz, Guttag, Dalca: Magnitude Invariant Parametrizations Improve Hypernetwork Learning, ICLR 2024,
    arXiv:2304.07645.
Equations: theta = theta_0 + H(enc(g)),  enc(g) = [cos(pi g / 2), sin(pi g / 2)] per number, so |enc(g)| = 1 for all g.
    Without it a network of piecewise linear layers without biases gives H(c g) = c H(g): weights grow with g.
Symbols: g (conditions,) in [0, 1]; theta_0 the base network's own parameters, trained, that start as they do without H;
    H linear layers with LeakyReLU between, the last one `gain` times as large as usual, so theta starts near theta_0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from gossamer.spec.errors import bad_input
from gossamer.spec.user_function import check_arguments, function_named

_KEY = "model.config"


def encoded(g: Tensor) -> Tensor:
    """Return [cos(pi g / 2), sin(pi g / 2)] of g (conditions,): (2 conditions,), each pair on the unit circle."""
    return torch.cat([torch.cos(math.pi / 2 * g), torch.sin(math.pi / 2 * g)], -1)


class MagnitudeInvariantHyper(nn.Module):
    """`base` with weights theta_0 + H(enc(g)). conditions: numbers in g; hidden: widths of H's layers."""

    def __init__(
        self, base: nn.Module, *, conditions: int = 1, hidden: tuple[int, ...] = (32, 32), gain: float = 0.1
    ) -> None:
        super().__init__()
        self.base = base
        self.named = {name: p.shape for name, p in base.named_parameters()}
        widths = [2 * conditions, *hidden, sum(shape.numel() for shape in self.named.values())]
        layers = [nn.Linear(a, b) for a, b in pairwise(widths)]
        with torch.no_grad():
            for layer in layers:
                nn.init.kaiming_normal_(layer.weight, a=0.01, nonlinearity="leaky_relu")
                nn.init.zeros_(layer.bias)
            rows = torch.cat([_scale(p).expand(p.shape).reshape(-1) for p in base.parameters()])
            layers[-1].weight.copy_(torch.randn(layers[-1].weight.shape) * gain * rows[:, None] / widths[-2] ** 0.5)
        between = [one for layer in layers[:-1] for one in (layer, nn.LeakyReLU(0.01))]
        self.hyper = nn.Sequential(*between, layers[-1])

    def offsets(self, condition: Tensor) -> dict[str, Tensor]:
        """Return H(enc(g)) by parameter of the base."""
        parts = torch.split(self.hyper(encoded(condition)), [shape.numel() for shape in self.named.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self.named.items(), parts, strict=True)}

    def weights(self, condition: Tensor) -> dict[str, Tensor]:
        """Return theta by parameter of the base."""
        own = dict(self.base.named_parameters())
        return {name: own[name] + offset for name, offset in self.offsets(condition).items()}

    def forward(self, inputs: Tensor, condition: Tensor) -> Any:
        """Return the base's output on `inputs` at condition (conditions,), or (rows, conditions) with equal rows."""
        if condition.ndim == 2:
            if not bool((condition == condition[:1]).all()):
                raise bad_input(
                    wanted="one condition for all rows of a batch, as it makes the weights",
                    got="rows with different ones",
                    do="call the model once for each condition",
                    key=_KEY,
                )
            condition = condition[0]
        return functional_call(self.base, self.weights(condition), (inputs,))


def _scale(parameter: Tensor) -> Tensor:
    """Return the standard deviation of a parameter, or that of a bias that starts at 0: (1,) per tensor."""
    found = parameter.detach().float().std(correction=0)
    return found if float(found) > 0 else torch.tensor(0.1)


def mip(
    *, base: str, base_config: Mapping[str, Any] | None = None, conditions: int = 1, gain: float = 0.1
) -> MagnitudeInvariantHyper:
    """Return a hypernetwork around the module that `base` ("package.module:function") returns; a factory.

    Its batches have the keys inputs and condition.
    """
    function = function_named(base, key=_KEY)
    check_arguments(function, base, dict(base_config or {}), key=_KEY)
    return MagnitudeInvariantHyper(function(**dict(base_config or {})), conditions=conditions, gain=gain)
