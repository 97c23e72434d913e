"""G_stack: grow depth by repeating a model that was trained for a short time, as a whole stack.

Paper: Du, W. et al., "Stacking your transformers: a closer look at model growth for efficient LLM pre-training",
NeurIPS 2024, arXiv:2405.15319, section 3 and equation of the growth timing.
Equations, for l -> g l blocks:
    block i of the target <- block i mod l of the source ; all other parameters are copied ; moments start anew
    log10 d = 0.88 log10 N + 163.27 / log10 C - 5.74 ,  C = 6 N D
Symbols: d tokens to train the small model, N parameters of the target, D tokens that the target is trained for.
Good when: a deep model is trained from scratch; the paper takes g = 4. Give it a full warm-up.
Not for: continuing a curve: the target's loss jumps at first.
Unlike the paper: d is held to 3 to 10 % of D, as the equation asks for more than D below about 1e9 parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from gossamer.grow import Grown, Growth, GrowthTask
from gossamer.grow._dim_map import DimMap
from gossamer.grow._grown import GrowthMap, Place, check_blocks, check_sizes, grow_tensors
from gossamer.grow._stream import indivisible
from gossamer.spec.errors import bad_input

LEAST, MOST = 0.03, 0.10  # of the target's tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class GStack(Growth):
    """Depth stacking."""

    def grow(self, task: GrowthTask) -> Grown:
        said = check_sizes(task, shrinks=False)
        before, after = check_blocks(task, "g_stack")
        if after % before:
            raise indivisible("g_stack", "blocks", "the repeated blocks", before, after)
        found = grow_tensors(task, [((i % before, 1.0),) for i in range(after)], _same)
        said |= {"blocks": [before, after]} | advised(said["target_parameters"], task.tokens)
        return Grown(tensors=found.tensors, eps=found.eps, said=said)


def _same(place: Place) -> GrowthMap:
    if place.before != place.after:
        raise bad_input(
            wanted=f"the same {place.role} in both models, as g_stack grows depth alone",
            got=f"{place.before} in the source and {place.after} in the target ({place.name})",
            do="keep the widths, or take lemon",
            key="--to",
        )
    return GrowthMap(values=DimMap.identity(place.before))


def growth_tokens(parameters: float, tokens: float) -> float:
    """Return the paper's tokens d for a target of `parameters` that is trained for `tokens`, not held to any limits."""
    work = math.log10(6 * parameters * tokens)
    return float(10 ** (0.88 * math.log10(parameters) + 163.27 / work - 5.74))


def advised(parameters: float, tokens: float) -> dict[str, Any]:
    """Return how many tokens the small model should have seen, and what the paper's equation says."""
    if not tokens:
        return {}
    asked = growth_tokens(parameters, tokens)
    held = min(max(asked, LEAST * tokens), MOST * tokens)
    return {"advised_source_tokens": round(held), "paper_source_tokens": round(asked), "target_tokens": round(tokens)}
