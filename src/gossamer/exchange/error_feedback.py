"""ErrorFeedback: adds the compression error of a step to the next input (EF-SGD; "1-bit SGD" before it had a theory).

Equations (rank i, step t; u_t = w_i g_t):
    s_t     = x_t + e_t / u_t
    mean_t  = exchange(s_t),   in which lost_t is missing of mine
    e_{t+1} = u_t lost_t,   and e_t + g_t owed_t where u_t = 0
    so that sum_t g_t mean_t + sum_i e_{i,T} = sum_t g_t sum_i w_i x_{i,t}
Symbols: x_t input; e_t residual, e_0 = 0; w_i my weight; g_t the learning rate with `track_lr`, else 1. So the
residual is what the parameters are still owed by this rank: neither a changing rate nor changing weights stretch
it, and the residuals of ranks that leave can be added to those of others. A step at rate 0 moves and owes nothing;
a rank without weight sends nothing of its residual, and adds to it what it has lost of the others' input (owed_t). What
the bucket's own type rounds off the mean is owed as well.
Wire:    that of the inner exchange.   State: numel float32, by parameter.   Work: 3 numel flop.
Paper:   Seide et al. 2014; Karimireddy et al., arXiv 1901.09847; the rate as in Zheng et al., arXiv 1905.10936.
Good when: the compressor contracts.   Not for: strong heterogeneity between ranks (see econtrol), or rates that fall
by orders of magnitude from one step to the next (the residual of a large step is large beside a small one).
Unlike the papers: weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gossamer.comm.bucket import Bucket, Layout, as_computed
from gossamer.comm.message import ExchangeContext, ExchangeState, Outcome, ProcessGroups, Rounds, Traffic
from gossamer.exchange import Exchange, ExchangeTraits
from gossamer.exchange._error_feedback import add_rounding_error, rate_of, settled


@dataclass(frozen=True, slots=True)
class ErrorFeedback(Exchange):
    """An error-feedback exchange around any exchange that returns its compression error, added to the next input."""

    inner: Exchange
    track_lr: bool = True

    @property
    def traits(self) -> ExchangeTraits:
        return replace(self.inner.traits, remembers=True)

    def init(self, layout: Layout) -> ExchangeState:
        e = torch.zeros(layout.numel, dtype=torch.float32, device=layout.device)
        return ExchangeState({"e": e}, (self.inner.init(self._computed(layout)),))

    def run(self, x: Bucket, state: ExchangeState, at: ExchangeContext) -> Rounds:
        (inner,), e = state.inner, state.tensors["e"]
        unit = at.share * rate_of(at, self.track_lr)
        layout = self._computed(x.layout)
        sent = torch.add(x.flat.to(layout.dtype), e, alpha=1 / unit if unit else 0.0)
        out = yield from self.inner.run(Bucket(layout, sent), inner, replace(at, accounts=True))
        owed = self._owed(out.lost, e, unit)
        if out.owed is not None:
            owed.add_(out.owed, alpha=rate_of(at, self.track_lr))
        mean = out.mean.to(x.layout.dtype)
        add_rounding_error(owed, out.mean, mean, rate_of(at, self.track_lr) * self.inner.rounding_error_weight(at))
        return Outcome(mean, None, ExchangeState({"e": owed}, (out.state,)))

    @staticmethod
    def _owed(lost: Tensor | None, e: Tensor, unit: float) -> Tensor:
        if not unit:
            return e.clone()
        return torch.zeros_like(e) if lost is None else lost.mul_(unit)

    def settled(self, state: ExchangeState, at: ExchangeContext, debt: Tensor) -> ExchangeState:
        return settled(state, at.share * rate_of(at, self.track_lr), debt)

    def traffic(self, layout: Layout, levels: ProcessGroups, rank: int) -> tuple[Traffic, ...]:
        return self.inner.traffic(self._computed(layout), levels, rank)

    def check(self, layout: Layout, levels: ProcessGroups) -> None:
        self.inner.check(self._computed(layout), levels)

    def _computed(self, layout: Layout) -> Layout:
        return as_computed(layout, lossless=self.inner.traits.lossless)
