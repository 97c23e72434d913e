"""Learning rates by parameter: another optimizer, with its rate times a factor where a name matches a pattern.

Equations: the inner rule with lr_scale * f(name), f the factor of the first pattern that is found in the name, else 1.
State:     that of the inner rule.
Good when: a head starts from random numbers and the rest from a checkpoint; LoRA+ (Hayou et al., ICML 2024,
arXiv:2402.12354), where B learns 16 times as fast as A: `lr_factors: [["lora_B", 16]]`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from gossamer.optimizer import Optimizer, OptimizerState
from gossamer.optimizer._foreach import chosen
from gossamer.optimizer._patterns import check_found, check_patterns
from gossamer.optimizer._wrapper import Wrapper
from gossamer.optimizer.adamw import AdamW
from gossamer.spec.errors import bad_input


@dataclass(frozen=True, kw_only=True)
class ByPattern(Wrapper):
    """An optimizer whose rate differs by parameter. `lr_factors`: (regular expression, factor above 0)."""

    inner: Optimizer = field(default_factory=AdamW)
    lr_factors: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        if self.inner.has_one_clip:
            do = "choose another optimizer for `inner`, or this one for all parameters"
            got = "one that moves all parameters under one clip"
            raise bad_input(wanted="an optimizer of single parameters", got=got, do=do, key="inner")
        check_patterns((pattern for pattern, _ in self.lr_factors), "lr_factors")
        for pattern, factor in self.lr_factors:
            if not 0 < factor < float("inf"):
                do = "write a finite factor above 0; model.freeze keeps parameters as they are"
                raise bad_input(wanted=f"a factor for {pattern!r} above 0", got=str(factor), do=do, key="lr_factors")

    def check(self, names: Collection[str]) -> None:
        self.inner.check(names)
        check_found((pattern for pattern, _ in self.lr_factors), names, "train.optimizer.by_pattern.lr_factors")

    def update(
        self,
        params: Mapping[str, Tensor],
        grads: Mapping[str, Tensor],
        state: OptimizerState,
        *,
        lr_scale: float,
        step: int,
    ) -> None:
        for factor, some in self._groups(params).items():
            self.inner.update(some, chosen(some, grads), state, lr_scale=factor * lr_scale, step=step)

    def update_apart(
        self,
        params: Mapping[str, Tensor],
        grads: Mapping[str, Tensor],
        state: OptimizerState,
        *,
        lr_scale: float,
        step: int,
    ) -> None:
        for factor, some in self._groups(params).items():
            self.inner.update_apart(some, chosen(some, grads), state, lr_scale=factor * lr_scale, step=step)

    def meet(
        self, params: Mapping[str, Tensor], moved: Mapping[str, Tensor], state: OptimizerState, *, rates: float
    ) -> None:
        for factor, some in self._groups(params).items():
            self.inner.meet(some, chosen(some, moved), state, rates=factor * rates)

    def _groups(self, params: Mapping[str, Tensor]) -> dict[float, dict[str, Tensor]]:
        """Return the parameters by factor, in the order in which the factors first occur."""
        found: dict[float, dict[str, Tensor]] = {}
        for name, param in params.items():
            found.setdefault(self._factor(name), {})[name] = param
        return found

    def _factor(self, name: str) -> float:
        if name not in self._known:
            matched = (factor for pattern, factor in self.lr_factors if re.search(pattern, name))
            self._known[name] = next(matched, 1.0)
        return self._known[name]

    @cached_property
    def _known(self) -> dict[str, float]:
        return {}
