"""Hypergradient: an outer (or inner) learning rate that grows while successive pseudo-gradients agree, else shrinks.

Equations:
    a <- min(max(a exp(kappa c), low), high),   c = <D, D'> / (|D| |D'|)
    of: outer    x <- x + a (R(x, D) - x)
    of: inner    x <- R(x, D), and the islands' learning rates are multiplied with a from now on
Symbols: x global parameters; D mean pseudo-gradient of this round, D' of the one before; R the inner outer optimizer;
ln a `log_factor` (state), 0 at first.
State:   that of the inner outer optimizer, 1 tensor as large as the parameters, 1 number.   Work: two passes more.
Paper:   Wang et al., FedHyper, ICLR 2024, arXiv 2310.03156 (its G and SL). There a <- a + <D, D'>, which grows with the
size of the model; the cosine (ours) does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gossamer.spec.errors import bad_input
from gossamer.spec.validate import not_negative, positive
from gossamer.sync.outer import OuterOptimizer, OuterState, OuterStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypergradient(OuterOptimizer):
    """A wrapper of any outer optimizer that adapts its learning rate or the inner one; with low = high = 1, neither."""

    inner: OuterOptimizer
    of: Literal["outer", "inner"] = "outer"
    kappa: float = 0.2
    low: float = 0.2
    high: float = 5.0

    def __post_init__(self) -> None:
        not_negative("kappa", self.kappa)
        positive("low", self.low)
        if not self.low <= 1 <= self.high:
            wanted, got = "low <= 1 <= high, as the factor starts at 1", f"low {self.low:g} and high {self.high:g}"
            raise bad_input(wanted=wanted, got=got, do="lower low to 1 or less, or raise high to 1 or more", key="low")
        if isinstance(self.inner, Hypergradient):  # both would adapt the same number
            raise bad_input(
                wanted="an inner outer optimizer other than hypergradient",
                got="hypergradient",
                do="choose another one, e.g. nesterov: gossamer methods sync/outer",
                key="inner",
            )

    @property
    def slots(self) -> tuple[str, ...]:
        return (*self.inner.slots, "displacement")

    @property
    def numbers(self) -> tuple[str, ...]:
        return (*self.inner.numbers, "log_factor")

    @torch.no_grad()
    def step(self, anchor: Sequence[Tensor], mean: Sequence[Tensor], state: OuterState, at: OuterStep) -> None:
        factor = self._adapt(mean, state)
        before = [x.clone() for x in anchor] if self.of == "outer" and factor != 1.0 else []
        self.inner.step(anchor, mean, state, at)
        for x, was in zip(anchor, before, strict=False):
            x.sub_(was).mul_(factor).add_(was)

    def inner_factor(self, state: OuterState) -> float:
        own = math.exp(state["log_factor"][0].item()) if self.of == "inner" else 1.0
        return own * self.inner.inner_factor(state)

    def _adapt(self, mean: Sequence[Tensor], state: OuterState) -> float:
        """Return the factor from this round on."""
        log = state["log_factor"][0]
        both, own, former = (0.0, 0.0, 0.0)
        for d, was in zip(mean, state["displacement"], strict=True):
            both += torch.dot(d, was).item()
            own += torch.dot(d, d).item()
            former += torch.dot(was, was).item()
            was.copy_(d)
        if own and former:
            moved = log.item() + self.kappa * both / math.sqrt(own * former)
            log.fill_(min(max(moved, math.log(self.low)), math.log(self.high)))
        return math.exp(log.item())
