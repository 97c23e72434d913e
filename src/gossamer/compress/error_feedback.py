"""ErrorFeedback: what was not sent is added to the next input (EF-SGD; "1-bit SGD" before it had a theory).

Equations (rank i, step t):
    s_t     = x_t + e_t / g_t
    mean_t  = exchange(s_t),   of which kept_t is my part
    e_{t+1} = g_t (s_t - kept_t)
Symbols: x_t input; e_t residual, e_0 = 0; g_t the learning rate with `track_lr`, else 1. So the residual is
what the parameters are still owed, and a changing rate does not stretch it; a step at rate 0 moves and owes nothing.
Wire:    that of the inner exchange.   State: numel float32, by parameter.   Work: 4 numel flop.
Paper:   Seide et al. 2014; Karimireddy et al., arXiv 1901.09847; the rate as in Zheng et al., arXiv 1905.10936.
Good when: the compressor contracts.   Not for: strong heterogeneity between ranks (see econtrol).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from gossamer.compress import Exchange, Traits
from gossamer.wire.bucket import Bucket, Layout, as_float
from gossamer.wire.message import Levels, Outcome, Round, Rounds, State, Traffic


@dataclass(frozen=True, slots=True)
class ErrorFeedback(Exchange):
    """Feedback around any exchange that says what it kept."""

    inner: Exchange
    track_lr: bool = True

    @property
    def traits(self) -> Traits:
        return replace(self.inner.traits, remembers=True)

    def init(self, layout: Layout) -> State:
        e = torch.zeros(layout.numel, dtype=torch.float32, device=layout.device)
        return State({"e": e}, (self.inner.init(as_float(layout)),))

    def run(self, x: Bucket, state: State, at: Round) -> Rounds:
        (inner,), e = state.inner, state.tensors["e"]
        unit = at.lr if self.track_lr else 1.0
        flat = x.flat.float()
        sent = torch.add(flat, e, alpha=1 / unit) if unit else flat.clone()
        out = yield from self.inner.run(Bucket(as_float(x.layout), sent), inner, at)
        owed = e.clone() if not unit else torch.zeros_like(e) if out.kept is None else sent.sub_(out.kept).mul_(unit)
        return Outcome(out.mean.to(x.layout.dtype), None, State({"e": owed}, (out.state,)))

    def traffic(self, layout: Layout, levels: Levels, rank: int) -> tuple[Traffic, ...]:
        return self.inner.traffic(as_float(layout), levels, rank)

    def check(self, layout: Layout, levels: Levels) -> None:
        self.inner.check(layout, levels)
