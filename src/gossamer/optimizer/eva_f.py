"""Eva-f: Eva with the vector of a layer's inputs alone, the vector form of FOOF.

Paper: Zhang, Shi, Li, arXiv:2308.02123; FOOF: Benzing, ICML 2022, arXiv:2201.12250.
Equations, for a layer with gradient G (outputs, inputs), bias as a last column:
    a <- (1 - xi) a + xi mean of inputs (and a 1 for the bias)
    U = (G - (G a) a^T / (|a|^2 + gamma)) / gamma  = G (a a^T + gamma I)^-1
and nu, momentum and symbols as in Eva.
State:   1 tensor per parameter, and as many numbers as inputs per layer.   Wire: one sum of these numbers per step.
Good when: as Eva; its steps do not depend on the scale of the loss.   Not for: as Eva.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.optimizer import LayerVectors, OptimizerState
from gossamer.optimizer._eva import PLAIN, EvaRule, Move, check, seen_of, with_bias


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaF(EvaRule):
    """Eva-f. `plain`: regular expressions of names of parameters that follow their gradient."""

    lr: float = 0.1
    momentum: float = 0.9
    damping: float = 0.03
    kl_clip: float = 1e-3
    decay: float = 0.95
    weight_decay: float = 0.0
    plain: tuple[str, ...] = PLAIN

    def __post_init__(self) -> None:
        check(self)

    def wants_vectors(self, params: Mapping[str, Tensor]) -> Collection[str]:
        return [name for name, param in params.items() if self.may_be_layer(name, param)]

    def sides(self, shape: tuple[int, ...]) -> dict[str, int]:
        return {"input": torch.Size(shape[1:]).numel()}

    @torch.no_grad()
    def see(self, vectors: Mapping[str, LayerVectors], state: OptimizerState) -> None:
        for name, one in vectors.items():
            self.averaged(state[name], {"input": one.input})

    def moves(self, params: Mapping[str, Tensor], grads: Mapping[str, Tensor], state: OptimizerState) -> list[Move]:
        found = []
        for name in seen_of([name for name in grads if "seen" in state[name]], state):
            bias, gradient = with_bias(name, grads)
            a = state[name]["input"].to(gradient.dtype)
            a = torch.cat([a, a.new_ones(1)]) if bias else a
            along = (gradient @ a) / (a.square().sum() + self.damping)
            found.append(Move(name, bias, gradient, torch.addr(gradient, along, a, alpha=-1.0) / self.damping))
        return found
