"""EControl: EF21 that also sends, a little at a time, the error it has made so far.

Equations (rank i, step t; u_t = w_i g_t):
    d_i    = x_i - h_i / w_i + eta e_i / u_t
    h_i   <- h_i + w_i kept(d_i) - owed_i
    e_i   <- e_i + g_t (w_i x_i - h_i)
    agg   <- agg + sum_j w_j kept(d_j) = sum_j h_j,   which is the mean
    so that sum_t g_t agg_t + sum_i e_{i,T} = sum_t g_t sum_i w_i x_{i,t}
Symbols: x_i input; w_i its weight; g_t the learning rate with `track_lr`, else 1; kept(d) what the inner exchange
keeps of d; h_i what all ranks know of my weighted input, e_i what the parameters are owed by this rank, both zero at
first; agg (numel,) the same on every rank, bit for bit. Rates and weights that change are treated as in
error_feedback (e) and ef21 (h, agg, owed). eta = 0 is ef21; the published e_i is this one divided by u_t.
eta:     without one, delta / (2 - delta) of the inner exchange for this very bucket, at most 0.5; 0.01 where it
declares no delta. Why: let each number be kept with probability delta. From one time to the next, G steps later, its
error is multiplied by 1 - eta G, and E(1 - eta G)^2 is least there; from twice that value on it is above one. `check`
refuses as much. Largest entries stand a little more: top-1 of 20 still converges at 2 delta, not at 2.5 delta.
Wire:    that of the inner exchange.   State: 3 numel float32, by parameter.   Work: 7 numel flop.
Paper:   Gao, Islamov, Stich, arXiv 2311.05645.
Good when: ranks differ (where error_feedback stalls) and gradients are noisy (where ef21 does).   Not for: ranks that
hardly differ: error_feedback is as good with a third of the state.
Unlike the paper: h_i starts at zero, not at a first gradient sent in full: every step sends the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gossamer.comm.bucket import Bucket, Layout, as_float
from gossamer.comm.message import ExchangeContext, ExchangeState, Outcome, ProcessGroups, Rounds, Traffic
from gossamer.exchange import Exchange, ExchangeTraits
from gossamer.exchange._error_feedback import add_rounding_error, rate_of, require_stateless, settled, tiles
from gossamer.spec.errors import bad_input

_HIGHEST = 0.5
_UNKNOWN = 0.01  # right for one number in 50, and slow for more


@dataclass(frozen=True, slots=True)
class EControl(Exchange):
    """An error-feedback exchange (EControl) around any exchange that returns its compression error.

    `eta`: the part of the accumulated error that is sent with each step.
    """

    inner: Exchange
    eta: float | None = None
    track_lr: bool = True

    def __post_init__(self) -> None:
        require_stateless(self.inner)
        if self.eta is not None and not 0 <= self.eta <= 1:
            raise bad_input(wanted="0 <= eta <= 1", got=repr(self.eta), do="remove eta: it is then computed", key="eta")

    @property
    def traits(self) -> ExchangeTraits:
        return replace(self.inner.traits, lossless=False, remembers=True)

    @property
    def needs_same_ranks(self) -> bool:
        return True

    def init(self, layout: Layout) -> ExchangeState:
        zero = torch.zeros(layout.numel, dtype=torch.float32, device=layout.device)
        return ExchangeState({"e": zero, "h": zero.clone(), "agg": zero.clone()}, (self.inner.init(as_float(layout)),))

    def run(self, x: Bucket, state: ExchangeState, at: ExchangeContext) -> Rounds:
        (inner,), e, h = state.inner, state.tensors["e"], state.tensors["h"]
        flat, share, rate = x.flat.float(), at.share, rate_of(at, self.track_lr)
        push = self.eta_of(x.layout) / (rate * share) if rate * share else 0.0
        sent = _news(flat, h, e, share=share, push=push)
        out = yield from self.inner.run(Bucket(as_float(x.layout), sent), inner, replace(at, accounts=True))
        agg = state.tensors["agg"] + out.mean
        # again: what was sent may have been overwritten
        kept = out.less_lost(_news(flat, h, e, share=share, push=push))
        known = out.less_owed(torch.add(h, kept, alpha=share, out=sent))
        mean = agg.to(x.layout.dtype, copy=True)  # the caller may change it
        owed = torch.empty_like(e)
        for one, old, new, heard in tiles(owed, e, flat, known):
            torch.add(old, new, alpha=rate * share, out=one).sub_(heard, alpha=rate)
        add_rounding_error(owed, agg, mean, rate * share)
        return Outcome(mean, None, ExchangeState({"e": owed, "h": known, "agg": agg}, (out.state,)))

    def settled(self, state: ExchangeState, at: ExchangeContext, debt: Tensor) -> ExchangeState:
        return settled(state, at.share * rate_of(at, self.track_lr), debt)

    def eta_of(self, layout: Layout) -> float:
        """Return the eta in force for a bucket of this layout."""
        if self.eta is not None:
            return self.eta
        delta = self.inner.contraction(as_float(layout))
        return _UNKNOWN if delta is None else min(delta / (2 - delta), _HIGHEST)

    def traffic(self, layout: Layout, levels: ProcessGroups, rank: int) -> tuple[Traffic, ...]:
        return self.inner.traffic(as_float(layout), levels, rank)

    def check(self, layout: Layout, levels: ProcessGroups) -> None:
        self.inner.check(as_float(layout), levels)
        delta = self.inner.contraction(as_float(layout))
        if self.eta is None or delta is None or layout.numel == 0:
            return
        limit = 2 * delta / (2 - delta)
        if self.eta >= limit:
            raise bad_input(
                wanted=f"eta below {limit:.3g} (the inner exchange contracts by delta = {delta:.3g})",
                got=f"{self.eta:g}, with which the residual grows without bound",
                do="remove eta: it is then computed",
                key="eta",
            )


def _news(flat: Tensor, h: Tensor, e: Tensor, *, share: float, push: float) -> Tensor:
    if not share:
        return torch.zeros_like(flat)
    found = torch.empty_like(flat)
    for one, new, old, owed in tiles(found, flat, h, e):
        torch.sub(new, old, alpha=1 / share, out=one).add_(owed, alpha=push)
    return found
