"""Average: replaces the global parameters by the weighted mean of the local parameters (federated averaging).

Equations:
    x <- x - D
Symbols: x global parameters; D mean pseudo-gradient, sum_i w_i (x - x_i) over islands i with weights w_i (samples
seen).
State:   none.   Work: one pass.
Paper:   McDonald et al. 2010; "federated averaging", McMahan et al., arXiv 1602.05629.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.sync.outer import OuterOptimizer, OuterState, OuterStep


@dataclass(frozen=True, slots=True)
class Average(OuterOptimizer):
    """The outer optimizer that replaces the global parameters by the weighted mean of the local ones."""

    @property
    def slots(self) -> tuple[str, ...]:
        return ()

    @torch.no_grad()
    def step(self, anchor: Sequence[Tensor], mean: Sequence[Tensor], state: OuterState, at: OuterStep) -> None:
        for x, d in zip(anchor, mean, strict=True):
            x.sub_(d)
