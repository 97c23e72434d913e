"""Wanda: weights count by their magnitude times the norm of the input that they see. No weight is updated.

Equation: score_ij = |W_ij| ||x_j||_2, compared within row i.
Symbols:  W (out, in) weight; x_j input feature j over all calibration tokens that reach the layer.
State:    the sum of x_j^2 of each layer in float64, added batch by batch, whose order does not matter.
Source:   Sun, Liu, Bair, Kolter, ICLR 2024, arXiv:2306.11695 (equation 1, section 3).
As in the paper a block sees what the pruned ones before it give; the layers of one block see it before any of them is
pruned. Unlike the paper: a layer that no token reaches is pruned by magnitude, and layers outside of the repeated
blocks, which the paper leaves, are pruned in their turn if they are included by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gossamer.prune import InputStatistics, Kept, Pruning, weighed


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanda(Pruning):
    """Pruning by weights and activations; the fields are those of every pruning."""

    sparsity: float | None = None
    pattern: str = ""
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    needs_text: ClassVar[bool] = True

    def __post_init__(self) -> None:
        Kept.of(self.sparsity, self.pattern)

    def scores(self, weight: Tensor, seen: InputStatistics | None) -> Tensor:
        return weighed(weight, seen)
