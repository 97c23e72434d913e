"""Proximal gradient: another optimizer's update, then the proximal operator of a penalty, for weights that are 0.

Paper: Parikh, Boyd, Proximal Algorithms, 2014, section 4.2; of stochastic steps: Duchi, Singer, JMLR 2009 (FOBOS).
Equations, with rate a = lr * lr_scale of the inner rule:
    w <- inner rule(w, g)
    w <- argmin_x P(x) + |x - w|^2 / (2 a)
Symbols: w parameter, g gradient, P the penalty of `operator`.
State:   that of the inner rule.   Work: a few passes over w.
Good when: neurons, inputs or weights are to be exactly 0, and without the bias of L1 (scad, mcp, log_sum, capped_l1).
As with decoupled weight decay, the step of the operator is the rate itself and not an adaptive rule's step by element:
for AdamW this is no minimizer of loss + P, for SGD it is.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from gossamer.optimizer import Optimizer, OptimizerState
from gossamer.optimizer._patterns import check_found, check_patterns
from gossamer.optimizer._wrapper import Wrapper
from gossamer.optimizer.adamw import AdamW
from gossamer.optimizer.by_pattern import ByPattern
from gossamer.optimizer.muon import Muon
from gossamer.optimizer.proximal_operator import ProximalOperator
from gossamer.optimizer.proximal_operator.l1 import L1
from gossamer.spec.errors import bad_input

_KEY = "train.optimizer.proximal.parameters"


@dataclass(frozen=True, kw_only=True)
class Proximal(Wrapper):
    """An optimizer whose updates are followed by a proximal operator.

    `parameters`: regular expressions; the operator applies to parameters in whose name one is found, by default to
    those with two or more dimensions.
    """

    inner: Optimizer = field(default_factory=AdamW)
    operator: ProximalOperator = field(default_factory=L1)
    parameters: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.inner, (ByPattern, Muon, Proximal)):
            raise bad_input(
                wanted="an inner optimizer with one rate for all parameters, which is the step of the operator",
                got=type(self.inner).__name__.lower(),
                do="take sgd or adamw; rates by parameter go around: {by_pattern: {inner: {proximal: ...}}}",
                key="inner",
            )
        if self.inner.owns_weights or self.inner.has_average or self.inner.has_one_clip:
            raise bad_input(
                wanted="an inner optimizer that moves each parameter by its gradient to where it is evaluated",
                got=type(self.inner).__name__,
                do="take sgd or adamw: an average of sparse points is not sparse, nor is a step under one clip a rate",
                key="inner",
            )
        check_patterns(self.parameters, "parameters")

    def check(self, names: Collection[str]) -> None:
        self.inner.check(names)
        check_found(self.parameters, names, _KEY)

    @property
    def by_element(self) -> bool:
        return self.inner.by_element and self.operator.by_element

    @property
    def sets_zeros(self) -> bool:
        return True

    @property
    def draws_to_zero(self) -> bool:
        return True  # by the penalty

    def update(
        self,
        params: Mapping[str, Tensor],
        grads: Mapping[str, Tensor],
        state: OptimizerState,
        *,
        lr_scale: float,
        step: int,
    ) -> None:
        self.inner.update(params, grads, state, lr_scale=lr_scale, step=step)
        self._shrink(params, grads, self.lr * lr_scale)

    def update_apart(
        self,
        params: Mapping[str, Tensor],
        grads: Mapping[str, Tensor],
        state: OptimizerState,
        *,
        lr_scale: float,
        step: int,
    ) -> None:
        self.inner.update_apart(params, grads, state, lr_scale=lr_scale, step=step)
        self._shrink(params, grads, self.lr * lr_scale)

    @torch.no_grad()
    def _shrink(self, params: Mapping[str, Tensor], grads: Mapping[str, Tensor], rate: float) -> None:
        """Apply the operator to the chosen parameters that have a gradient."""
        if rate == 0:
            return
        for name in grads:
            if self._is_penalized(name, params[name].ndim):
                param = params[name].detach()
                param.copy_(self.operator.prox(param, rate))

    def _is_penalized(self, name: str, ndim: int) -> bool:
        if not self.parameters:
            return ndim >= 2
        if name not in self._known:
            self._known[name] = any(re.search(pattern, name) for pattern in self.parameters)
        return self._known[name]

    @cached_property
    def _known(self) -> dict[str, bool]:
        return {}
