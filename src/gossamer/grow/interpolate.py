"""Interpolate: a large model mixed with the copies of the small one that it was coalesced to (end of the V-cycle).

Paper: Zou, L. et al., "A multi-level framework for accelerating training transformer models", ICLR 2024,
arXiv:2404.07999, section 3.3.
Equation: w <- (1 - alpha) w_before + alpha de_coalesce(w_small)
Symbols: w_before the large model before it was coalesced (`onto`), w_small the source.
Good when: alpha is below 1, which tells the copies apart. Moments start anew; warm up again.
"""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.grow import Grown, Growth, GrowthTask
from gossamer.grow._groups import grouped
from gossamer.spec.errors import BadInput, bad_input


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpolate(Growth):
    """A mixture. onto: run folder or model of the target's sizes; alpha: weight of the grown one, 0 to 1."""

    onto: str = ""
    alpha: float = 0.25

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise BadInput(f"alpha: wanted 0 to 1, got {self.alpha}: set 0.25", key="alpha")

    @property
    def before(self) -> str:
        return self.onto

    def grow(self, task: GrowthTask) -> Grown:
        found = grouped(task, method="interpolate", shrinks=False)
        if other := sorted(
            name for name, one in found.tensors.items() if task.before.get(name, one[..., :0]).shape != one.shape
        ):
            raise bad_input(
                wanted="the large model before it was coalesced, of the target's sizes, as onto",
                got=f"{self.onto or 'none'} (first difference: {other[0]})",
                do="write --by '{interpolate: {onto: RUN_DIR, alpha: 0.25}}'",
                key="--by",
            )
        mixed = {
            name: ((1 - self.alpha) * task.before[name].double() + self.alpha * one.double()).to(one.dtype)
            if one.is_floating_point()
            else one
            for name, one in found.tensors.items()
        }
        return Grown(tensors=mixed, eps=found.eps, said={**found.said, "alpha": self.alpha})
