"""Eva: second-order steps from two vectors per layer, at about the cost of SGD.

Paper: Zhang, Shi, Li, ICLR 2023, https://openreview.net/forum?id=_Mic8V96Voy; arXiv:2308.02123.
Equations, for a layer with gradient G (outputs, inputs), bias as a last column, and rate a = lr * lr_scale:
    a <- (1 - xi) a + xi mean of inputs (and a 1 for the bias) ;   b <- (1 - xi) b + xi b_now
    U = (G - (b^T G a) / (|a|^2 |b|^2 + gamma) b a^T) / gamma  = (b b^T (x) a a^T + gamma I)^-1 G
    nu = min(1, sqrt(kappa / sum over layers of a^2 <U, G>)) ;   kappa = 0: nu = |G| / |U|, over all layers
    m <- momentum m + nu U + weight_decay w ;   w <- w - a m
Symbols: a, b `input`, `output` (state), xi `decay`, gamma `damping`, kappa `kl_clip`, m `momentum` (state). b_now is
the sum over all positions of the output's gradient of the mean loss: the gradient of a bias.
State:   1 tensor per parameter, and inputs + outputs numbers per layer.   Wire: one sum of these numbers per step.
Good when: layers are linear or convolutional, and first-order steps are slow.   Not for: a layer whose inputs are
normalized (a is about 0 there and U about G / gamma), or whose output is over the batch (b is 0); a large loss beside
gamma (b a^T is the mean part of G, and U has little of it); stages, sharded states and islands, which are refused.
Everything else (embeddings, norms, the head, `plain`) moves by SGD with momentum, without nu.
Unlike the paper: vectors are of all samples, not of the first 16; b of a kernel is a sum over positions, not a mean.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.optimizer import LayerVectors, OptimizerState
from gossamer.optimizer._eva import PLAIN, EvaRule, Move, check, rank_one, seen_of, wide, with_bias


@dataclass(frozen=True, slots=True, kw_only=True)
class Eva(EvaRule):
    """Eva. `plain`: regular expressions of names of parameters that follow their gradient."""

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
        return {"input": torch.Size(shape[1:]).numel(), "output": shape[0]}

    @torch.no_grad()
    def see(self, vectors: Mapping[str, LayerVectors], state: OptimizerState) -> None:
        for name, one in vectors.items():
            self.averaged(state[name], {"input": one.input, "output": one.output})

    def moves(self, params: Mapping[str, Tensor], grads: Mapping[str, Tensor], state: OptimizerState) -> list[Move]:
        found = []
        for name in seen_of([name for name in grads if "seen" in state[name]], state):
            bias, gradient = with_bias(name, grads)
            a, b = wide(state[name]["input"]), wide(state[name]["output"])
            a = torch.cat([a, a.new_ones(1)]) if bias else a
            found.append(Move(name, bias, gradient, rank_one(gradient, b, a, self.damping)))
        return found
