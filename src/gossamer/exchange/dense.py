"""Dense: the plain weighted mean, by an all-reduce. The exchange every other one is judged against.

Equations:
    mean = sum_i w_i x_i
Symbols: x_i (numel,) input of rank i; w_i its weight, sum_i w_i = 1.
Wire:    1 round SUM, numel elements in the bucket's own type.   State: none.   Work: numel flop.
Good when: the link is faster than any encoding.   Not for: links slower than the backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.comm.bucket import Bucket, Layout
from gossamer.comm.message import (
    Collective,
    ExchangeContext,
    ExchangeState,
    Message,
    Outcome,
    ProcessGroups,
    Rounds,
    Traffic,
)
from gossamer.exchange import Exchange, ExchangeTraits


@dataclass(frozen=True, slots=True)
class Dense(Exchange):
    """An all-reduce in place: the mean is stored in the bucket."""

    @property
    def traits(self) -> ExchangeTraits:
        return ExchangeTraits(lossless=True)

    def init(self, layout: Layout) -> ExchangeState:
        return ExchangeState()

    def run(self, x: Bucket, state: ExchangeState, at: ExchangeContext) -> Rounds:
        weight = at.share
        if weight != 1.0:  # a factor of one is a pass over memory for nothing
            x.flat.mul_(weight)
        (mean,) = yield Message((x.flat,), Collective.SUM)
        return Outcome(mean, None, state)

    def traffic(self, layout: Layout, levels: ProcessGroups, rank: int) -> tuple[Traffic, ...]:
        return (Traffic(Collective.SUM, layout.numel, layout.dtype.itemsize),)
