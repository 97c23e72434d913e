"""The learning rates of a loop's optimizers, which error feedback follows."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer


@dataclass(frozen=True, slots=True)
class LearningRates:
    """The learning rates of the optimizers that move a model's parameters, as their groups hold them now."""

    optimizers: tuple[weakref.ref[Optimizer], ...] = ()

    def by_parameter(self) -> dict[int, float]:
        """Return the rate of every parameter that an optimizer moves, by the parameter's id: the largest of several."""
        found: dict[int, float] = {}
        for one in self.optimizers:
            if (optimizer := one()) is None:
                continue
            for group in optimizer.param_groups:
                rate = _rate_of(group)
                for param in group["params"]:
                    found[id(param)] = max(rate, found.get(id(param), rate))
        return found


def _rate_of(group: Mapping[str, Any]) -> float:
    """Return the rate of a parameter group; 1 for an optimizer that has none, or finds its own."""
    rate = group.get("lr")
    return 1.0 if rate is None else float(rate)
