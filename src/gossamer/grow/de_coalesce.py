"""De-coalesce: a larger model of copies of a small one's units and blocks (up the V-cycle).

Paper: Zou, L. et al., "A multi-level framework for accelerating training transformer models", ICLR 2024,
arXiv:2404.07999, section 3.2.
Equations: see `_groups`, large <- small.
Good when: followed by `interpolate`: copies are equal and get equal gradients, so alone they stay equal.
Not for: continuing a curve where depth grows too: repeated blocks change what the model computes. lemon does not.
Unlike the paper: the norm in front of a tied head takes the factor 1/g, so that a wider tied model computes the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.grow import Grown, Growth, GrowthTask
from gossamer.grow._groups import grouped


@dataclass(frozen=True, slots=True, kw_only=True)
class DeCoalesce(Growth):
    """Copies of units and blocks."""

    def grow(self, task: GrowthTask) -> Grown:
        return grouped(task, method="de_coalesce", shrinks=False)
