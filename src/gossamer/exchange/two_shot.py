"""TwoShot: an exchange for codecs whose messages cannot be added: all-to-all, sum in float32, all-gather.

Equations (n ranks, chunk c belongs to rank c):
    m_c  = w_c x_c[c] + sum_{i != c} w_i D(C(x_i[c]))      what its owner sums: its own numbers need no code
    mean = (D(C'(m_0)), ..., D(C'(m_{n-1})))
    lost_i = x_i - D(C(x_i)), and on its own chunk  (m_i - D(C'(m_i))) / w_i;   owed_i = m_i - D(C'(m_i)) where w_i = 0
Symbols: x_i (numel,) input of rank i; w_i its weight; C `codec`, C' `return_codec` (the same codec where none is
given). The owner takes the loss of the second encoding on itself, so that feedback around it sees both; one without
weight owes it to the mean.
Wire:    SHUFFLE of n messages of ceil(numel / n) numbers, then GATHER of one: 2 (n-1)/n of an encoded bucket. Where
messages are as long as they need to be, a MAX of 4 bytes goes before each, and all are padded to the longest.
State:   none.   Work: per element one encoding, which finds out what is lost as well, and one decoding.
Paper:   the scatter-reduce-all-gather of Markov et al., CGX, arXiv 2111.08617; in LoongForge and DeepSpeed for 8 bits.
Good when: the link is slower than encoding.   Exact where the codec is lossless, in a fixed order of summing.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

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
from gossamer.comm.random_key import Key, key_of
from gossamer.exchange import Exchange, ExchangeTraits
from gossamer.exchange.codec import Codec, check_width


@dataclass(frozen=True, slots=True)
class TwoShot(Exchange):
    """An exchange through codecs: `codec` to the owner of a chunk, `return_codec` from there to all ranks."""

    codec: Codec
    return_codec: Codec | None = None

    @property
    def traits(self) -> ExchangeTraits:
        there, back = self.codec.traits, self._back.traits
        return ExchangeTraits(
            lossless=there.lossless and back.lossless, fixed_size=there.fixed_size and back.fixed_size
        )

    def init(self, layout: Layout) -> ExchangeState:
        return ExchangeState()

    def run(self, x: Bucket, state: ExchangeState, at: ExchangeContext) -> Rounds:
        ranks, me = len(at.members), at.place
        chunk = self._chunk(x.layout.numel, ranks)
        rows = _rows(x.flat.float(), ranks, chunk)  # in the end, what is lost of them
        loses = at.accounts and not self.traits.lossless
        key, key_back = key_of(at, x.layout), key_of(at, x.layout, turn=1)
        sent = yield from _even(self.codec, self._for_others(rows, me, key, loses=loses))  # (ranks, nbytes)
        (arrived,) = yield Message((sent,), Collective.SHUFFLE)
        mine = self._summed(rows[me], arrived, at, key)
        answer = yield from _even(self._back, _encoded(self._back, mine, key_back, mine if loses else None))
        (answers,) = yield Message((answer,), Collective.GATHER)
        mean = self._back.decode(answers, chunk, key_back)  # (ranks, chunk)
        owed = None
        if loses and at.share > 0:
            mine.mul_(1 / at.share)
        elif loses:
            owed = torch.zeros_like(rows)
            owed[me].copy_(mine)
            mine.zero_()
            owed = _flat(owed, x.layout)
        lost = _flat(rows, x.layout) if loses else None
        return Outcome(_flat(mean, x.layout).to(x.layout.dtype), lost, state, owed)

    def _for_others(self, rows: Tensor, me: int, key: Key, *, loses: bool) -> Tensor:
        """(ranks, nbytes): every row encoded but my own, which travels nowhere."""
        if not self.codec.traits.fixed_size:  # all at once, as one length must do for all
            mine = rows[me].clone()
            sent = _encoded(self.codec, rows, key, rows if loses else None)
            rows[me] = mine
            return sent
        sent = rows.new_empty((len(rows), self.codec.nbytes(rows.shape[1])), dtype=torch.uint8)
        sent[me] = 0
        for others in (slice(0, me), slice(me + 1, None)):
            if len(here := rows[others]):
                own = replace(key, own=key.own + (others.start or 0))
                sent[others] = _encoded(self.codec, here, own, here if loses else None)
        return sent

    def _summed(self, own: Tensor, arrived: Tensor, at: ExchangeContext, key: Key) -> Tensor:
        """Return the weighted sum of this rank's chunk, in place: its own numbers, plus the decoded ones of others."""
        total = own.mul_(at.share)
        for rank, (message, share) in enumerate(zip(arrived, at.shares, strict=True)):
            if rank != at.place:
                self.codec.add(total, message, share, key)
        return total

    def traffic(self, layout: Layout, levels: ProcessGroups, rank: int) -> tuple[Traffic, ...]:
        ranks = len(levels.group("all", rank))
        chunk = self._chunk(layout.numel, ranks)
        there = Traffic(Collective.SHUFFLE, ranks * self.codec.nbytes(chunk), 1)
        back = Traffic(Collective.GATHER, self._back.nbytes(chunk), 1)
        return (*_agreeing(self.codec), there, *_agreeing(self._back), back)

    def check(self, layout: Layout, levels: ProcessGroups) -> None:
        check_width(layout, self.codec, self._back)

    @property
    def _back(self) -> Codec:
        return self.return_codec or self.codec

    def _chunk(self, numel: int, ranks: int) -> int:
        """Return the numbers per owner, rounded up to blocks where blocks are small beside it."""
        each = max(1, -(-numel // ranks))
        block = self.codec.block
        return -(-each // block) * block if each > 64 * block else each


def _encoded(codec: Codec, x: Tensor, key: Key, lost: Tensor | None) -> Tensor:
    return codec.encode(x, key) if lost is None else codec.encode_losing(x, key, lost)


def _agreeing(codec: Codec) -> tuple[Traffic, ...]:
    return () if codec.traits.fixed_size else (Traffic(Collective.MAX, 1, 4),)


def _even(codec: Codec, message: Tensor) -> Generator[Message, tuple[Tensor, ...], Tensor]:
    """`message`, padded to the longest of all ranks."""
    if codec.traits.fixed_size:
        return message
    mine = torch.tensor([message.shape[-1]], dtype=torch.int32, device=message.device)
    (longest,) = yield Message((mine,), Collective.MAX)
    return pad(message, (0, int(longest) - message.shape[-1]))


def _rows(flat: Tensor, ranks: int, chunk: int) -> Tensor:
    missing = ranks * chunk - flat.numel()
    return (pad(flat, (0, missing)) if missing else flat).view(ranks, chunk)


def _flat(rows: Tensor, layout: Layout) -> Tensor:
    return rows.view(-1)[: layout.numel]
