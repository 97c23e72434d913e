"""UniPT: a parallel network reads the hidden states of all blocks and corrects the last (Diao et al. 2023).

Paper: Diao, Wan, Jia, Zhuge, Zhang, Lu, Chen: UniPT, CVPR 2024, arXiv:2308.14316.
Equations: those of `_aggregation` with a_i = 1 and R_i = 1: each tap's tokens are weighted by their likeness to the
    output feature (parallel interaction), the taps by a learned confidence (confidence aggregation).
State: N (d k + k) + k + d k + d parameters, k = d / reduction.   Saved for backward: N tokens (d + k) numbers.
Unlike the paper: one width and no dropout; the tokens of a causal language model are read as `tokens` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gossamer.model.side import SideNetwork
from gossamer.model.side._aggregation import Aggregation


@dataclass(frozen=True)
class UniPt(SideNetwork):
    """UniPT. All fields are those of every side network."""

    reduction: int = 8
    tokens: str = "auto"
    taps: tuple[str, ...] = ()
    widths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.check()

    def aggregation(self, widths: Sequence[int], width: int) -> Aggregation:
        return Aggregation(widths, width, guided=False, redundancy=False)
