"""MoE-Pruner: Wanda for a mixture of experts, where a token counts by the weight that the router gives the expert.

Equation: score_ij = |W_ij| ||x_j g||_2, compared within row i.
Symbols:  W (out, in) weight of an expert; x_j its input feature j over the calibration tokens that were routed to it; g
          the router's weight of the expert for each of these tokens. For the last matrix of an expert x is the inner
          activation, times the same g.
State:    the sum of (g x_j)^2 of each matrix in float64, added batch by batch, whose order does not matter.
Source:   Xie, Zhang, Zhou, Xie, Song, Liu, Wang, Lin, Xu, 2024, arXiv:2410.12013 (section 3).
g is what the model itself multiplies with the expert's output, after its own normalization over the chosen experts. A
constant g gives Wanda's masks. Linear layers outside of the experts are pruned by Wanda, and blocks one after the other
as there. An expert that no token reaches is pruned by magnitude, and reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gossamer.prune import InputStatistics, Kept, Pruning, weighed


@dataclass(frozen=True, slots=True, kw_only=True)
class MoePruner(Pruning):
    """Pruning by weights, activations and the router's weights; the fields are those of every pruning."""

    sparsity: float | None = None
    pattern: str = ""
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    needs_text: ClassVar[bool] = True
    weighs_by_gate: ClassVar[bool] = True

    def __post_init__(self) -> None:
        Kept.of(self.sparsity, self.pattern)

    def scores(self, weight: Tensor, seen: InputStatistics | None) -> Tensor:
        return weighed(weight, seen)
