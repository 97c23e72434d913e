"""TwoShot: an exchange for codecs whose messages cannot be added: all-to-all, sum in float32, all-gather.

Equations (n ranks, chunk c belongs to rank c):
    m_c  = w_c x_c[c] + sum_{i != c} w_i D(C(x_i[c]))      what its owner sums: its own numbers need no code
    mean = (D(C'(m_0)), ..., D(C'(m_{n-1})))
    kept_i = D(C(x_i)), and on its own chunk  x_i + (D(C'(m_i)) - m_i) / w_i
Symbols: x_i (numel,) input of rank i; w_i its weight; C `codec`, C' `back` (the same codec where none is given).
The owner takes the loss of the second encoding on itself, so mean = sum_i w_i kept_i and feedback around it sees both.
Wire:    SHUFFLE of n messages of ceil(numel / n) numbers, then GATHER of one: 2 (n-1)/n of an encoded bucket. Where
messages are as long as they need to be, a MAX of 4 bytes goes before each, and all are padded to the longest.
State:   none.   Work: per element one encoding, one decoding, and another decoding for `kept`.
Paper:   the scatter-reduce-all-gather of Markov et al., CGX, arXiv 2111.08617; in LoongForge and DeepSpeed for 8 bits.
Good when: the link is slower than encoding.   Exact where the codec is lossless, in a fixed order of summing.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from gossamer.compress import Exchange, Traits
from gossamer.compress._key import key_of
from gossamer.compress.codec import Codec, Key
from gossamer.wire.bucket import Bucket, Layout
from gossamer.wire.message import Combine, Levels, Message, Outcome, Round, Rounds, State, Traffic


@dataclass(frozen=True, slots=True)
class TwoShot(Exchange):
    """`codec` on the way to the owner of a chunk, `back` on the way back to everybody."""

    codec: Codec
    back: Codec | None = None

    @property
    def traits(self) -> Traits:
        there, back = self.codec.traits, self._back.traits
        return Traits(lossless=there.lossless and back.lossless, fixed_size=there.fixed_size and back.fixed_size)

    def init(self, layout: Layout) -> State:
        return State()

    def run(self, x: Bucket, state: State, at: Round) -> Rounds:
        ranks, me = len(at.members), at.place
        chunk = self._chunk(x.layout.numel, ranks)
        rows = _rows(x.flat.float(), ranks, chunk)
        key, key_back = key_of(at, x.layout), key_of(at, x.layout, turn=1)
        sent = yield from _even(self.codec, self._for_others(rows, me, key))  # (ranks, nbytes)
        (arrived,) = yield Message((sent,), Combine.SHUFFLE)
        mine = self._summed(rows[me], arrived, at, key)
        answer = yield from _even(self._back, self._back.encode(mine, key_back))
        (answers,) = yield Message((answer,), Combine.GATHER)
        mean = self._back.decode(answers, chunk, key_back)  # (ranks, chunk)
        kept = None if self.traits.lossless else self._kept(rows[me], sent, mean[me] - mine, at, key)
        return Outcome(_flat(mean, x.layout), None if kept is None else _flat(kept, x.layout).float(), state)

    def _for_others(self, rows: Tensor, me: int, key: Key) -> Tensor:
        """(ranks, nbytes): every row encoded but my own, which travels nowhere."""
        if not self.codec.traits.fixed_size:
            return self.codec.encode(rows, key)
        sent = torch.zeros((len(rows), self.codec.nbytes(rows.shape[1])), dtype=torch.uint8, device=rows.device)
        for others in (slice(0, me), slice(me + 1, None)):
            if len(rows[others]):
                sent[others] = self.codec.encode(rows[others], replace(key, own=key.own + (others.start or 0)))
        return sent

    def _summed(self, own: Tensor, arrived: Tensor, at: Round, key: Key) -> Tensor:
        """The weighted sum of my chunk: my own numbers as they are, then what the others sent, in rank order."""
        me, total = at.place, own * at.share
        for others in (slice(0, me), slice(me + 1, None)):
            if len(arrived[others]):
                total += self.codec.mean(arrived[others], own.numel(), at.shares[others], key)
        return total

    def _kept(self, own: Tensor, sent: Tensor, lost_back: Tensor, at: Round, key: Key) -> Tensor:
        me, numel = at.place, own.numel()
        kept = torch.empty((len(sent), numel), dtype=torch.float32, device=own.device)
        for others in (slice(0, me), slice(me + 1, None)):
            if len(sent[others]):
                kept[others] = self.codec.decode(sent[others], numel, key)
        kept[me] = torch.add(own, lost_back, alpha=1 / at.share) if at.share > 0 else own
        return kept

    def traffic(self, layout: Layout, levels: Levels, rank: int) -> tuple[Traffic, ...]:
        ranks = len(levels.group("all", rank))
        chunk = self._chunk(layout.numel, ranks)
        there = Traffic(Combine.SHUFFLE, ranks * self.codec.nbytes(chunk), 1)
        back = Traffic(Combine.GATHER, self._back.nbytes(chunk), 1)
        return (*_agreeing(self.codec), there, *_agreeing(self._back), back)

    @property
    def _back(self) -> Codec:
        return self.back or self.codec

    def _chunk(self, numel: int, ranks: int) -> int:
        """Numbers per owner: in whole blocks where these are small beside it."""
        each = max(1, -(-numel // ranks))
        block = self.codec.block
        return -(-each // block) * block if each > 64 * block else each


def _agreeing(codec: Codec) -> tuple[Traffic, ...]:
    return () if codec.traits.fixed_size else (Traffic(Combine.MAX, 1, 4),)


def _even(codec: Codec, message: Tensor) -> Generator[Message, tuple[Tensor, ...], Tensor]:
    """`message`, padded to the longest of all ranks."""
    if codec.traits.fixed_size:
        return message
    mine = torch.tensor([message.shape[-1]], dtype=torch.int32, device=message.device)
    (longest,) = yield Message((mine,), Combine.MAX)
    return pad(message, (0, int(longest) - message.shape[-1]))


def _rows(flat: Tensor, ranks: int, chunk: int) -> Tensor:
    missing = ranks * chunk - flat.numel()
    return (pad(flat, (0, missing)) if missing else flat).view(ranks, chunk)


def _flat(rows: Tensor, layout: Layout) -> Tensor:
    return rows.flatten()[: layout.numel].to(layout.dtype)
