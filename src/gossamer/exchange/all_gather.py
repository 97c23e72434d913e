"""Gather: every rank encodes its whole bucket once and sends it to all; everybody decodes and sums.

Equations:
    mean = sum_i w_i D(C(x_i)), in rank order;   lost_i = x_i - D(C(x_i))
Symbols: x_i (numel,) input of rank i; w_i its weight; C `codec`, D its decoding.
Wire:    GATHER of one message of numel numbers; where messages differ in length, before it a GATHER of the lengths
(4 bytes), and the messages are filled up to the longest.   State: none.   Work: one encoding, n decodings.
Paper:   the all-gather of QSGD, arXiv 1610.02132, and of GRACE (Xu et al., ICDCS 2021).
Good when: two ranks (the bytes of two_shot, one encoding and one round less), or messages so small that rounds count.
Not for: many ranks: (n - 1) messages are sent, where two_shot sends 2 (n - 1) / n.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

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
class AllGather(Exchange):
    """An all-gather of buckets encoded once by `codec`, which every rank decodes and sums."""

    codec: Codec

    @property
    def traits(self) -> ExchangeTraits:
        return ExchangeTraits(lossless=self.codec.traits.lossless, fixed_size=self.codec.traits.fixed_size)

    def init(self, layout: Layout) -> ExchangeState:
        return ExchangeState()

    def run(self, x: Bucket, state: ExchangeState, at: ExchangeContext) -> Rounds:
        numel, key = x.layout.numel, key_of(at, x.layout)
        flat, loses = x.flat.float(), at.accounts and not self.traits.lossless
        sent = self.codec.encode_losing(flat, key, flat) if loses else self.codec.encode(flat, key)
        if self.codec.traits.fixed_size:
            (messages,) = yield Message((sent,), Collective.GATHER)
            # Rows of nothing are not aligned, so they are not decoded.
            mean = self.codec.mean(messages, numel, at.shares, key) if numel else flat.clone()
        else:
            mean = yield from self._uneven(sent, numel, at, key)
        return Outcome(mean.to(x.layout.dtype), flat if loses else None, state)

    def _uneven(
        self, sent: Tensor, numel: int, at: ExchangeContext, key: Key
    ) -> Generator[Message, tuple[Tensor, ...], Tensor]:
        length = torch.tensor([sent.numel()], dtype=torch.int32, device=sent.device)
        (answers,) = yield Message((length,), Collective.GATHER)
        lengths = answers.flatten().tolist()
        (messages,) = yield Message((pad(sent, (0, max(lengths) - sent.numel())),), Collective.GATHER)
        mean = torch.zeros(numel, dtype=torch.float32, device=sent.device)
        for message, one, share in zip(messages, lengths, at.shares, strict=True):
            mean.add_(self.codec.decode(message[:one], numel, key), alpha=share)
        return mean

    def traffic(self, layout: Layout, levels: ProcessGroups, rank: int) -> tuple[Traffic, ...]:
        whole = Traffic(Collective.GATHER, self.codec.nbytes(layout.numel), 1)
        return (whole,) if self.codec.traits.fixed_size else (Traffic(Collective.GATHER, 1, 4), whole)

    def contraction(self, layout: Layout) -> float | None:
        return self.codec.traits.contraction

    def check(self, layout: Layout, levels: ProcessGroups) -> None:
        check_width(layout, self.codec)
