"""DeltaReference: ranks send how their input differs from a reference that all of them hold and move alike.

Equations (rank i, step t):
    d_i   = x_i - r
    r    <- r + sum_j w_j kept(d_j),   which is the mean;   kept_i = r_before + kept(d_i), so mean = sum_i w_i kept_i
Symbols: x_i input; w_i its weight, sum_i w_i = 1; kept(d) what the inner exchange keeps of d; r (numel,) the running
estimate, zero at first, the same on every rank, bit for bit. Weights may change from step to step: r has no owner.
Not EF21: there every rank has a reference h_i of its own, sum_i h_i is the mean, and what is sent goes to zero as
inputs settle. Here there is one reference for all, half the state, and what is sent goes to the distance between a
rank's input and the mean: the loss per step is that of compressing disagreement, not of compressing gradients. Where
all ranks hold one input, or one rank owns each number (weights behind a shard), it is EF21, and the loss is that of the
last difference alone: no error adds up. Where ranks differ and the compressor is biased, what is lost in every step
has a direction, so it is not remembered and is declared lossy: put error_feedback around it.
Wire:    that of the inner exchange.   State: numel float32, by parameter.   Work: 2 numel flop.
Paper:   the weight differences (qWD) of SDP4Bit, Jia et al., arXiv 2410.15526, for any exchange.
Good when: inputs move slowly beside their size (parameters, momenta, late gradients).   Not for: noisy gradients.
Unlike the paper: the first step sends the difference to zero, compressed like any other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gossamer.comm.bucket import Bucket, Layout, as_computed
from gossamer.comm.message import ExchangeContext, ExchangeState, Outcome, ProcessGroups, Rounds, Traffic
from gossamer.exchange import Exchange, ExchangeTraits
from gossamer.exchange._error_feedback import require_stateless


@dataclass(frozen=True, slots=True)
class DeltaReference(Exchange):
    """An exchange, through `inner`, of the difference to a reference that all ranks hold.

    `inner` must return its compression error.
    """

    inner: Exchange

    def __post_init__(self) -> None:
        require_stateless(self.inner)

    @property
    def traits(self) -> ExchangeTraits:
        return self.inner.traits

    @property
    def needs_same_ranks(self) -> bool:
        return True

    def init(self, layout: Layout) -> ExchangeState:
        r = torch.zeros(layout.numel, dtype=torch.float32, device=layout.device)
        return ExchangeState({"r": r}, (self.inner.init(self._computed(layout)),))

    def run(self, x: Bucket, state: ExchangeState, at: ExchangeContext) -> Rounds:
        (inner,), r = state.inner, state.tensors["r"]
        layout = self._computed(x.layout)
        out = yield from self.inner.run(Bucket(layout, x.flat.to(layout.dtype) - r), inner, at)
        moved = r + out.mean
        mean = moved.to(x.layout.dtype, copy=True)  # the caller may change it
        return Outcome(mean, out.lost, ExchangeState({"r": moved.float()}, (out.state,)), out.owed)

    def traffic(self, layout: Layout, levels: ProcessGroups, rank: int) -> tuple[Traffic, ...]:
        return self.inner.traffic(self._computed(layout), levels, rank)

    def check(self, layout: Layout, levels: ProcessGroups) -> None:
        self.inner.check(self._computed(layout), levels)

    def _computed(self, layout: Layout) -> Layout:
        return as_computed(layout, lossless=self.inner.traits.lossless)
