"""Magnitude pruning: the smallest weights of each output row go. Needs no text.

Equation: score_ij = |W_ij|, compared within row i.
Symbols:  W (out, in) weight.
Source:   Han, Pool, Tran, Dally, NeurIPS 2015, arXiv:1506.02626.
Unlike the paper: one shot, and every row has the same sparsity (the paper compares all weights of a layer), so that it
is the baseline of methods which compare within rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gossamer.prune import InputStatistics, Kept, Pruning


@dataclass(frozen=True, slots=True, kw_only=True)
class Magnitude(Pruning):
    """Pruning by the magnitude of weights; the fields are those of every pruning."""

    sparsity: float | None = None
    pattern: str = ""
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        Kept.of(self.sparsity, self.pattern)

    def scores(self, weight: Tensor, seen: InputStatistics | None) -> Tensor:
        return weight.double().abs()
