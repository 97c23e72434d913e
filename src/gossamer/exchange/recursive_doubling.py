"""Tree: recursive doubling. In round k every rank swaps its partial sum with the rank 2^k away; all end with the whole.

Equations (p the largest power of two <= n, s_r the partial sum of place r):
    fold     s_r = w_r x_r;   place r >= p sends s_r to r - p, which adds it
    round k  s_r <- s_l + s_h,   l = the lower of r and r xor 2^k, h the higher   (k = 0 .. log2 p - 1; r < p)
    unfold   place r - p sends the sum to r >= p;   mean = s_r
Symbols: x_r (numel,) input of place r; w_r its weight; n ranks.
Wire:    log2(n) rounds of pairwise shuffles of numel float32, and 2 more where n is no power of two.
         S bytes per round and rank.   State: none.   Work: numel flop per round.
Paper:   Thakur, Rabenseifner, Gropp 2005 (recursive doubling); named beside the star in TPI-LLM, arXiv 2410.00531.
Good when: messages are small and a hub's link would be the bottleneck.   Not for: large buckets (a ring sends less).
Why not a reduction to one rank and a broadcast: that takes twice the rounds. Both halves of a swap add the same two
numbers, and addition commutes exactly, so all ranks of a block hold the same bits: the order of summing is one tree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

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
class RecursiveDoubling(Exchange):
    """An all-reduce by recursive doubling. It has no fields."""

    @property
    def traits(self) -> ExchangeTraits:
        return ExchangeTraits(lossless=True)

    def init(self, layout: Layout) -> ExchangeState:
        return ExchangeState()

    def run(self, x: Bucket, state: ExchangeState, at: ExchangeContext) -> Rounds:
        numel, ranks, me = x.layout.numel, len(at.members), at.place
        total = x.flat.to(torch.float32, copy=True).mul_(at.share)
        for step in _steps(ranks, me):
            sent = total if step.sends is not None else total[:0]
            (arrived,) = yield step.message(sent, numel, ranks)
            if step.hears is None:
                continue
            total = arrived if step.final else total.add_(arrived)
        return Outcome(total.to(x.layout.dtype), None, state)

    def traffic(self, layout: Layout, levels: ProcessGroups, rank: int) -> tuple[Traffic, ...]:
        group = levels.group("all", rank)
        nothing = torch.empty(layout.numel, device="meta")
        steps = _steps(len(group), group.index(rank))
        messages = [
            s.message(nothing[: layout.numel if s.sends is not None else 0], layout.numel, len(group)) for s in steps
        ]
        return tuple(Traffic.of(m) for m in messages)


@dataclass(frozen=True, slots=True)
class _Step:
    """One round of one rank: the ranks it sends to and receives from, and whether it receives the complete sum."""

    sends: int | None = None
    hears: int | None = None
    final: bool = False

    def message(self, part: torch.Tensor, numel: int, ranks: int) -> Message:
        return Message(
            (part,),
            Collective.SHUFFLE,
            splits=tuple(numel if place == self.sends else 0 for place in range(ranks)),
            arriving=tuple(numel if place == self.hears else 0 for place in range(ranks)),
        )


def _steps(ranks: int, me: int) -> Iterator[_Step]:
    """Yield the rounds of one rank, as many on every rank; at least one, so that a single rank has a round too."""
    power = 1 << (ranks.bit_length() - 1)
    extra = ranks - power
    outside = me >= power
    if extra or ranks == 1:
        yield _Step(sends=me - power) if outside else _Step(hears=me + power if me < extra else None)
    for k in range(power.bit_length() - 1):
        yield _Step() if outside else _Step(sends=me ^ (1 << k), hears=me ^ (1 << k))
    if extra:
        yield (_Step(hears=me - power, final=True) if outside else _Step(sends=me + power if me < extra else None))
