"""Dense: the plain weighted mean, by an all-reduce. The exchange every other one is judged against.

Equations:
    mean = sum_i w_i x_i
Symbols: x_i (numel,) input of rank i; w_i its weight, sum_i w_i = 1.
Wire:    1 round SUM, numel elements in the bucket's own type.   State: none.   Work: numel flop.
Good when: the link is faster than any encoding.   Not for: links slower than the backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.compress import Exchange, Traits
from gossamer.wire.bucket import Bucket, Layout
from gossamer.wire.message import Combine, Levels, Message, Outcome, Round, Rounds, State, Traffic


@dataclass(frozen=True, slots=True)
class Dense(Exchange):
    """All-reduce in place: the mean takes the bucket's own storage."""

    @property
    def traits(self) -> Traits:
        return Traits(lossless=True)

    def init(self, layout: Layout) -> State:
        return State()

    def run(self, x: Bucket, state: State, at: Round) -> Rounds:
        weight = at.share
        if weight != 1.0:  # a factor of one is a pass over memory for nothing
            x.flat.mul_(weight)
        (mean,) = yield Message((x.flat,), Combine.SUM)
        return Outcome(mean, None, state)

    def traffic(self, layout: Layout, levels: Levels, rank: int) -> tuple[Traffic, ...]:
        return (Traffic(Combine.SUM, layout.numel, layout.dtype.itemsize),)
