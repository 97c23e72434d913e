"""Eva-s: Eva with vectors of the gradient itself, the vector form of Shampoo.

Paper: Zhang, Shi, Li, arXiv:2308.02123; Shampoo: Gupta, Koren, Singer, ICML 2018, arXiv:1802.09568.
Equations, for a matrix with gradient G (rows, columns); a kernel has all but its first dimension as columns:
    b <- (1 - xi) b + xi (mean of every row of G) ;   a <- (1 - xi) a + xi (mean of every column of G)
    U = (G - (b^T G a) / (|a|^2 |b|^2 + gamma) b a^T) / gamma  = (b b^T (x) a a^T + gamma I)^-1 G
and nu, momentum and symbols as in Eva; a `column`, b `row` (state). Biases move by SGD with momentum.
State:   1 tensor per parameter, and rows + columns numbers per matrix.   Wire: nothing beside the gradients.
Good when: as Eva, and layers are of other kinds than linear.   Not for: stages, sharded states and islands, which are
refused: one clip is for all layers. Means of gradients are small: with |a|^2 |b|^2 far below gamma it is SGD.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.optimizer import OptimizerState
from gossamer.optimizer._eva import PLAIN, EvaRule, Move, check, rank_one, wide


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaS(EvaRule):
    """Eva-s. `plain`: regular expressions of names of parameters that follow their gradient."""

    lr: float = 0.1
    momentum: float = 0.9
    damping: float = 0.03
    kl_clip: float = 1e-3
    decay: float = 0.95
    weight_decay: float = 0.0
    plain: tuple[str, ...] = PLAIN

    def __post_init__(self) -> None:
        check(self)

    def sides(self, shape: tuple[int, ...]) -> dict[str, int]:
        return {"row": shape[0], "column": torch.Size(shape[1:]).numel()}

    def moves(self, params: Mapping[str, Tensor], grads: Mapping[str, Tensor], state: OptimizerState) -> list[Move]:
        found = []
        for name in (name for name in grads if "seen" in state[name]):
            gradient, slots = wide(grads[name]).contiguous().flatten(1), state[name]
            self.averaged(slots, {"row": gradient.mean(1), "column": gradient.mean(0)})
            update = rank_one(gradient, wide(slots["row"]), wide(slots["column"]), self.damping)
            found.append(Move(name, "", gradient, update))
        return found
