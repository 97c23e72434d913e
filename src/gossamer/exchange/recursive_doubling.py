"""Tree: recursive doubling. In round k every rank swaps its partial sum with the rank 2^k away; all end with the whole.

Equations (p the largest power of two <= n, s_r the partial sum of place r, Q(s) = D(C(s)), s itself without a codec):
    fold     s_r = w_r x_r;   place r >= p sends C(s_r) to r - p, which adds Q(s_r)
    round k  s_r <- Q(s_l) + Q(s_h),   l = the lower of r and r xor 2^k, h the higher   (k = 0 .. log2 p - 1; r < p)
    unfold   where n > p: s_r <- Q(s_r), which place r - p sends to r >= p;   mean = s_r
    lost_r = (sum of s - Q(s) of the blocks of 2^k places of which r is the first) / w_r;   where w_r = 0: owed
Symbols: x_r (numel,) input of place r; w_r its weight; n ranks; C `codec`, D its inverse.
Wire:    log2(n) rounds of pairwise shuffles of numel float32, or of a message of the codec, and 2 more where n is no
         power of two.   State: none.   Work: numel flop per round; with a codec one encoding and two decodings.
Paper:   Thakur, Rabenseifner, Gropp 2005 (recursive doubling); named beside the star in TPI-LLM, arXiv 2410.00531.
Good when: messages are small and a hub's link would be the bottleneck.   Not for: large buckets (a ring sends less).
Why not a reduction to one rank and a broadcast: that takes twice the rounds. Both halves of a swap add the same two
numbers, and addition commutes exactly, so all ranks of a block hold the same bits: the order of summing is one tree.
With a codec they add what both have decoded, a rank's own numbers too. So it must encode equal numbers equally.
Unlike the paper: the codec. Between two ranks it takes one message where two shots take two, of as many bytes in all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gossamer.comm.bucket import Bucket, Layout, sum_dtype
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
from gossamer.comm.random_key import Key, key_of
from gossamer.exchange import Exchange, ExchangeTraits
from gossamer.exchange.codec import Codec
from gossamer.spec.errors import bad_input


@dataclass(frozen=True, slots=True)
class RecursiveDoubling(Exchange):
    """An all-reduce by recursive doubling. `codec`: of each message; None: float32."""

    codec: Codec | None = None

    def __post_init__(self) -> None:
        if self.codec is not None and (self.codec.traits.unbiased or not self.codec.traits.fixed_size):
            raise bad_input(
                wanted="a codec that rounds to nearest, to messages of one length",
                got=repr(self.codec),
                do="give {cast: {dtype: bfloat16}}, or leave codec out",
                key="codec",
            )

    @property
    def traits(self) -> ExchangeTraits:
        return ExchangeTraits(lossless=self.codec is None or self.codec.traits.lossless)

    def init(self, layout: Layout) -> ExchangeState:
        return ExchangeState()

    def run(self, x: Bucket, state: ExchangeState, at: ExchangeContext) -> Rounds:
        numel, ranks, me = x.layout.numel, len(at.members), at.place
        coder = _Coder(self.codec, numel, replace(key_of(at, x.layout), own=0))
        total = x.flat.to(self._kind(x.layout), copy=True).mul_(at.share)
        lost = torch.zeros_like(total) if at.accounts and not self.traits.lossless else None
        for step in _steps(ranks, me):
            sent = coder.encoded(total) if step.sends is not None else coder.encoded(total[:0])
            if step.rounds and self.codec is not None:
                rounded = coder.decoded(sent if step.sends is not None else coder.encoded(total))
                if lost is not None and step.first:
                    lost.add_(total).sub_(rounded)
                total = rounded
            (arrived,) = yield step.message(sent, coder.length, ranks)
            if step.hears is None:
                continue
            total = coder.decoded(arrived) if step.final else total.add_(coder.decoded(arrived))
        mean = total.to(x.layout.dtype)
        if lost is None or at.share > 0:
            return Outcome(mean, None if lost is None else lost.mul_(1 / at.share), state)
        return Outcome(mean, torch.zeros_like(lost), state, lost)

    def traffic(self, layout: Layout, levels: ProcessGroups, rank: int) -> tuple[Traffic, ...]:
        group = levels.group("all", rank)
        length = layout.numel if self.codec is None else self.codec.nbytes(layout.numel)
        kind = self._kind(layout) if self.codec is None else torch.uint8
        nothing = torch.empty(length, dtype=kind, device="meta")
        steps = _steps(len(group), group.index(rank))
        messages = [s.message(nothing[: length if s.sends is not None else 0], length, len(group)) for s in steps]
        return tuple(Traffic.of(m) for m in messages)

    def _kind(self, layout: Layout) -> torch.dtype:
        """Return the dtype of partial sums; codecs take float32."""
        return sum_dtype(layout.dtype) if self.codec is None else torch.float32


@dataclass(frozen=True, slots=True)
class _Coder:
    """What is sent of a partial sum: float32, or the messages of a codec."""

    codec: Codec | None
    numel: int
    key: Key

    @property
    def length(self) -> int:
        """Return the elements of a message."""
        return self.numel if self.codec is None else self.codec.nbytes(self.numel)

    def encoded(self, total: Tensor) -> Tensor:
        if self.codec is None:
            return total
        return self.codec.encode(total, self.key) if len(total) else total.to(torch.uint8)

    def decoded(self, message: Tensor) -> Tensor:
        return message if self.codec is None else self.codec.decode(message, self.numel, self.key)


@dataclass(frozen=True, slots=True)
class _Step:
    """One round of one rank: the ranks it sends to and receives from, and whether it receives the complete sum.

    `rounds`: with a codec, this rank goes on with what it has decoded of its own sum; `first`: it is the first of those
    that have this sum.
    """

    sends: int | None = None
    hears: int | None = None
    final: bool = False
    rounds: bool = False
    first: bool = False

    def message(self, part: Tensor, numel: int, ranks: int) -> Message:
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
    if ranks == 1:  # what is lost is lost here as well
        yield _Step(rounds=True, first=True)
    if extra:
        fold = _Step(sends=me - power, rounds=True, first=True)
        yield fold if outside else _Step(hears=me + power if me < extra else None)
    for k in range(power.bit_length() - 1):
        first, other = me % (1 << k) == 0, me ^ (1 << k)
        yield _Step() if outside else _Step(sends=other, hears=other, rounds=True, first=first)
    if extra:
        unfold = _Step(sends=me + power if me < extra else None, rounds=True, first=me == 0)
        yield _Step(hears=me - power, final=True) if outside else unfold
