"""EF21: every rank sends how its gradient differs from what the others already know of it.

Equations (rank i, step t):
    d_i   = x_i - h_i / w_i
    h_i  <- h_i + w_i kept(d_i) - owed_i
    agg  <- agg + sum_j w_j kept(d_j) = sum_j h_j,   which is the mean
Symbols: x_i input; w_i its weight; kept(d) what the inner exchange keeps of d; h_i what all ranks know of my weighted
input w_i x_i, h_i = 0 at first; agg (numel,) the same on every rank, bit for bit.
Memory counts weighted inputs, so agg = sum_j h_j holds, up to rounding, also where weights change from step to step:
a changed weight is a changed w_i x_i, and is sent like any other change. With constant weights this is the paper's
method, h_i being w_i times the paper's. A rank without weight cannot be heard: its h_i stays as it is until it can, but
for owed_i, what it has lost of others' input in an exchange that encodes twice.
Nothing is owed to the parameters, so learning rates play no part.
Wire:    that of the inner exchange.   State: 2 numel float32, by parameter.   Work: 3 numel flop.
Paper:   Richtarik, Sokolov, Fatkhullin, arXiv 2106.05203.
Good when: ranks differ much and gradients have little noise.   Not for: noisy gradients of small batches (see
ef21_sgdm, econtrol): the estimate lags 1 / delta steps behind, and its noise does not average out.
Unlike the paper: h_i starts at zero, not at a first gradient sent in full: every step sends the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from gossamer.comm.bucket import Bucket, Layout, as_float
from gossamer.comm.message import ExchangeContext, ExchangeState, Outcome, ProcessGroups, Rounds, Traffic
from gossamer.exchange import Exchange, ExchangeTraits
from gossamer.exchange._error_feedback import difference, require_stateless


@dataclass(frozen=True, slots=True)
class EF21(Exchange):
    """An error-feedback exchange (EF21) around any exchange that returns its compression error."""

    inner: Exchange

    def __post_init__(self) -> None:
        require_stateless(self.inner)

    @property
    def traits(self) -> ExchangeTraits:
        return replace(self.inner.traits, lossless=False, remembers=True)

    @property
    def needs_same_ranks(self) -> bool:
        return True

    def init(self, layout: Layout) -> ExchangeState:
        zero = torch.zeros(layout.numel, dtype=torch.float32, device=layout.device)
        return ExchangeState({"h": zero, "agg": zero.clone()}, (self.inner.init(as_float(layout)),))

    def run(self, x: Bucket, state: ExchangeState, at: ExchangeContext) -> Rounds:
        (inner,), h, share = state.inner, state.tensors["h"], at.share
        flat = x.flat.float()
        sent = difference(flat, h, share)
        out = yield from self.inner.run(Bucket(as_float(x.layout), sent), inner, replace(at, accounts=True))
        agg = state.tensors["agg"] + out.mean
        # again: what was sent may have been overwritten
        kept = out.less_lost(difference(flat, h, share))
        h = torch.add(h, kept, alpha=share, out=sent)
        known = {"h": out.less_owed(h), "agg": agg}
        mean = agg.to(x.layout.dtype, copy=True)  # the caller may change it
        return Outcome(mean, None, ExchangeState(known, (out.state,)))

    def traffic(self, layout: Layout, levels: ProcessGroups, rank: int) -> tuple[Traffic, ...]:
        return self.inner.traffic(as_float(layout), levels, rank)

    def check(self, layout: Layout, levels: ProcessGroups) -> None:
        self.inner.check(as_float(layout), levels)
