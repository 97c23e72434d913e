"""Momentum: sends the momentum of the gradient, which changes slowly, and not the gradient.

Equations (rank i, step t):
    m_i = beta m_{t-1} + (1 - beta) x_i ;   m_t = exchange(m_i)
    mean = (m_t - beta m_{t-1}) / (1 - beta),   lost_i = lost_{m,i} / (1 - beta)
Symbols: x_i input; m the momentum, the same on all ranks, zero at first. So an update rule whose momentum has the same
beta comes to m_t itself, with all that the code made of it, and no noise of its own.
Wire:    that of the inner exchange.   State: numel float32, by parameter.   Work: 4 numel flop.
Paper:   Tang et al., 1-bit Adam, ICML 2021, arXiv 2102.02888: with warmup, error feedback and sign inside, and
one_bit_adam as the rule.
Good when: gradients are noisy.   Not for: clipping: the norm of `mean` is that of the code's error over 1 - beta.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.comm.bucket import Bucket, Layout, as_computed
from gossamer.comm.message import ExchangeContext, ExchangeState, Outcome, ProcessGroups, Rounds, Traffic
from gossamer.exchange import Exchange, ExchangeTraits
from gossamer.spec.errors import bad_input


@dataclass(frozen=True, slots=True)
class Momentum(Exchange):
    """An exchange of the gradient's momentum around any exchange.

    Put error feedback inside, without `track_lr`: its residual is momentum, not an update of parameters.
    """

    inner: Exchange
    beta: float = 0.9

    def __post_init__(self) -> None:
        if not 0 <= self.beta < 1:
            do = "set it to the first of the optimizer's betas, e.g. 0.9"
            raise bad_input(wanted="a beta of 0 or more and below 1", got=f"{self.beta:g}", do=do, key="beta")

    @property
    def traits(self) -> ExchangeTraits:
        return self.inner.traits

    @property
    def has_true_norm(self) -> bool:
        return False

    @property
    def needs_same_ranks(self) -> bool:
        return True

    def init(self, layout: Layout) -> ExchangeState:
        momentum = torch.zeros(layout.numel, dtype=torch.float32, device=layout.device)
        return ExchangeState({"momentum": momentum}, (self.inner.init(self._computed(layout)),))

    def run(self, x: Bucket, state: ExchangeState, at: ExchangeContext) -> Rounds:
        (inner,), before = state.inner, state.tensors["momentum"]
        layout = self._computed(x.layout)
        sent = torch.lerp(x.flat.to(layout.dtype), before.to(layout.dtype), self.beta)
        out = yield from self.inner.run(Bucket(layout, sent), inner, at)
        mean = torch.sub(out.mean, before, alpha=self.beta).div_(1 - self.beta)
        lost = out.lost.div_(1 - self.beta) if out.lost is not None else None
        after = ExchangeState({"momentum": out.mean.float().clone()}, (out.state,))
        owed = out.owed.div_(1 - self.beta) if out.owed is not None else None
        return Outcome(mean.to(x.layout.dtype), lost, after, owed)

    def settled(self, state: ExchangeState, at: ExchangeContext, debt: Tensor) -> ExchangeState:
        of_momentum = torch.zeros_like(debt)
        after = ExchangeState(state.tensors, (self.inner.settled(state.inner[0], at, of_momentum),))
        debt.add_(of_momentum, alpha=1 / (1 - self.beta))
        return after

    def traffic(self, layout: Layout, levels: ProcessGroups, rank: int) -> tuple[Traffic, ...]:
        return self.inner.traffic(self._computed(layout), levels, rank)

    def check(self, layout: Layout, levels: ProcessGroups) -> None:
        self.inner.check(self._computed(layout), levels)

    def _computed(self, layout: Layout) -> Layout:
        return as_computed(layout, lossless=self.inner.traits.lossless)
