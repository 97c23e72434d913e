"""Coalesce: a smaller model from the means of a large one's groups of units and blocks (down the V-cycle).

Paper: Zou, L. et al., "A multi-level framework for accelerating training transformer models", ICLR 2024,
arXiv:2404.07999, section 3.1.
Equations: see `_groups`, small <- large. Moments start anew.
Good when: the large model was trained for a short time; the small one is trained for long, and grown back.
Not for: sizes that are not multiples.
Unlike the paper: the norm in front of a tied head takes the factor, and not the embedding, which halves the logits.
"""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.grow import Grown, Growth, GrowthTask
from gossamer.grow._groups import grouped


@dataclass(frozen=True, slots=True, kw_only=True)
class Coalesce(Growth):
    """Means of groups, for a target that is smaller than the source."""

    def grow(self, task: GrowthTask) -> Grown:
        return grouped(task, method="coalesce", shrinks=True)
