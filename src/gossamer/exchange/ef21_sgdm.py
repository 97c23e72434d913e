"""EF21-SGDM: EF21 of each rank's momentum instead of its gradient.

Equations (rank i, step t):
    m_i  <- (1 - a) m_i + a w_i x_i
    d_i   = (m_i - h_i) / w_i
    h_i  <- h_i + w_i kept(d_i) - owed_i
    agg  <- agg + sum_j w_j kept(d_j) = sum_j h_j,   which is the mean
Symbols: x_i input; w_i its weight; m_i running mean of my weighted inputs, h_i what all ranks know of it, both zero
at first; a in (0, 1]; kept(d) what the inner exchange keeps of d; owed_i as in ef21; agg (numel,) the same on every
rank, bit for bit.
Weights that change are treated as in ef21; a rank without weight forgets, and is heard when it has weight again.
Wire:    that of the inner exchange.   State: 3 numel float32, by parameter.   Work: 6 numel flop.
Paper:   Fatkhullin, Tyurin, Richtarik, arXiv 2305.15155.
Good when: ranks differ and gradients are noisy.   Not for: optimizers whose own momentum is to stay as it was tuned:
this one comes on top of it (with SGD, set that one to 0).
Unlike the paper: m_i and h_i start at zero, not at a first gradient sent in full, so the first 1 / a means are small.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gossamer.comm.bucket import Bucket, Layout, as_float
from gossamer.comm.message import ExchangeContext, ExchangeState, Outcome, ProcessGroups, Rounds, Traffic
from gossamer.exchange import Exchange, ExchangeTraits
from gossamer.exchange._error_feedback import require_stateless, tiles
from gossamer.spec.errors import bad_input


@dataclass(frozen=True, slots=True)
class EF21SGDM(Exchange):
    """An error-feedback exchange (EF21-SGDM) around any exchange that returns its compression error.

    `a`: weight of a new gradient in the momentum.
    """

    inner: Exchange
    a: float = 0.1

    def __post_init__(self) -> None:
        require_stateless(self.inner)
        if not 0 < self.a <= 1:
            raise bad_input(wanted="0 < a <= 1", got=repr(self.a), do="give 0.1 (momentum 0.9)", key="a")

    @property
    def traits(self) -> ExchangeTraits:
        return replace(self.inner.traits, lossless=False, remembers=True)

    @property
    def needs_same_ranks(self) -> bool:
        return True

    def init(self, layout: Layout) -> ExchangeState:
        zero = torch.zeros(layout.numel, dtype=torch.float32, device=layout.device)
        return ExchangeState({"m": zero, "h": zero.clone(), "agg": zero.clone()}, (self.inner.init(as_float(layout)),))

    def run(self, x: Bucket, state: ExchangeState, at: ExchangeContext) -> Rounds:
        (inner,), h, share = state.inner, state.tensors["h"], at.share
        m = (state.tensors["m"] * (1 - self.a)).add_(x.flat.float(), alpha=self.a * share)
        sent = _news(m, h, share)
        out = yield from self.inner.run(Bucket(as_float(x.layout), sent), inner, replace(at, accounts=True))
        agg = state.tensors["agg"] + out.mean
        # again: what was sent may have been overwritten
        kept = out.less_lost(_news(m, h, share))
        h = torch.add(h, kept, alpha=share, out=sent)
        known = {"m": m, "h": out.less_owed(h), "agg": agg}
        mean = agg.to(x.layout.dtype, copy=True)  # the caller may change it
        return Outcome(mean, None, ExchangeState(known, (out.state,)))

    def traffic(self, layout: Layout, levels: ProcessGroups, rank: int) -> tuple[Traffic, ...]:
        return self.inner.traffic(as_float(layout), levels, rank)

    def check(self, layout: Layout, levels: ProcessGroups) -> None:
        self.inner.check(as_float(layout), levels)


def _news(m: Tensor, h: Tensor, share: float) -> Tensor:
    if not share:
        return torch.zeros_like(m)
    found = torch.empty_like(m)
    for one, new, old in tiles(found, m, h):
        torch.sub(new, old, out=one).div_(share)
    return found
