"""UnevenTopK: every rank sends as many of its largest entries as its link bears, to everybody, point to point.

Equations:
    S_i    = places of the k_i largest |x_i|,   k_i = max(1, round(fractions[i] numel)), numel where 8 k_i >= 4 numel
    v_i    = p_i / w_i x_i on S_i, 0 elsewhere,   p_i = w_i f_i^tilt / sum_j w_j f_j^tilt
    o      = number of ranks that sent a place as other than zero;   M = gamma where 1 <= o <= overlap, 1 elsewhere
    kept_i = M v_i;   mean = sum_i w_i kept_i = M sum_i p_i (x_i on S_i)
Symbols: x_i (numel,) input of rank i; w_i its weight; f_i = fractions[i] (one fraction: that of every rank).
Wire:    uneven SHUFFLE: 8 k_i bytes (float32 value, int32 place), or 4 numel of a rank that sends all, to each of the
others: no rank waits for bytes that another does not have.   State: none.   Work: a selection over numel.
Paper:   Tang et al., arXiv 2408.14736: fractions by bandwidth (policy.bcrs), and OPWA, which is `gamma`,
`overlap_max_senders`: entries that few ranks kept are diluted by the weights of those that did not, and are scaled up
again.
Good when: links differ, ways in are wider than ways out.   Not for: many ranks (what arrives grows with n).
`gamma` > 1 is for bare use on skewed data: feedback around it takes back what it adds; on like data it diverges. Unlike
the paper: its rule for coefficients by bandwidth is replaced by the power `tilt`, 0 unless given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

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
from gossamer.exchange._sparse import count_of, packed
from gossamer.ops.pack import pack, unpack
from gossamer.ops.topk_indices import largest
from gossamer.spec.errors import bad_input

_Piece: TypeAlias = tuple[Tensor, Tensor | None]  # values and their places; no places: all of them


@dataclass(frozen=True, slots=True)
class UnevenTopK(Exchange):
    """A top-k exchange with unequal `fractions`, one per rank or one for all."""

    fractions: tuple[float, ...] = (0.01,)
    gamma: float = 1.0
    overlap_max_senders: int = 1
    tilt: float = 0.0

    def __post_init__(self) -> None:
        if not self.fractions or not all(0 < f <= 1 for f in self.fractions):
            raise bad_input(
                wanted="0 < fraction <= 1 for every rank", got=repr(self.fractions), do="give [0.01]", key="fractions"
            )
        if not 0 < self.gamma < math.inf:
            raise bad_input(wanted="gamma > 0", got=repr(self.gamma), do="give 1", key="gamma")
        if self.overlap_max_senders < 1:
            raise bad_input(
                wanted="at least 1 sender", got=repr(self.overlap_max_senders), do="give 1", key="overlap_max_senders"
            )
        if not math.isfinite(self.tilt):
            raise bad_input(wanted="a finite tilt", got=repr(self.tilt), do="give 0", key="tilt")

    @property
    def traits(self) -> ExchangeTraits:
        return ExchangeTraits()

    def init(self, layout: Layout) -> ExchangeState:
        return ExchangeState()

    def run(self, x: Bucket, state: ExchangeState, at: ExchangeContext) -> Rounds:
        flat, numel = x.flat.float(), x.layout.numel
        splits, arriving = self._splits(numel, at.members, at.rank)
        mine = self._encoded(flat, at, key_of(at, x.layout))
        sent = mine.repeat(len(at.members) - 1)
        (arrived,) = yield Message((sent,), Collective.SHUFFLE, splits=splits, arriving=arriving)
        messages = list(torch.split(arrived, list(arriving)))  # type: ignore[no-untyped-call]
        messages[at.place] = mine
        pieces = [self._decoded(m, self._count(numel, r)) for m, r in zip(messages, at.members, strict=True)]
        shares = self._shares(at)
        mean = _total(flat, pieces, shares)
        kept = _total(flat, [pieces[at.place]], [shares[at.place] / at.share if at.share > 0 else 1.0])
        if self.gamma != 1.0:
            senders = _total(flat, [((v != 0).to(v.dtype), where) for v, where in pieces], [1.0] * len(pieces))
            mask = torch.where((senders >= 1) & (senders <= self.overlap_max_senders), self.gamma, 1.0)
            mean.mul_(mask)
            kept.mul_(mask)
        return Outcome(mean.to(x.layout.dtype), flat - kept, state)

    def traffic(self, layout: Layout, levels: ProcessGroups, rank: int) -> tuple[Traffic, ...]:
        splits, arriving = self._splits(layout.numel, levels.group("all", rank), rank)
        return (Traffic(Collective.SHUFFLE, sum(splits), 1, splits=splits, arriving=arriving),)

    def contraction(self, layout: Layout) -> float | None:
        if self.gamma != 1.0 or self.tilt:
            return None
        return min(self._count(layout.numel, r) for r in range(len(self.fractions))) / max(1, layout.numel)

    def check(self, layout: Layout, levels: ProcessGroups) -> None:
        ranks = sum(len(group) for group in levels.groups["all"])
        if len(self.fractions) not in (1, ranks):
            raise bad_input(
                wanted=f"one fraction, or one for each of {ranks} ranks",
                got=f"{len(self.fractions)} fractions",
                do=f"list 1 or {ranks} fractions",
                key="fractions",
            )

    def _fraction(self, rank: int) -> float:
        return self.fractions[rank] if len(self.fractions) > 1 else self.fractions[0]

    def _count(self, numel: int, rank: int) -> int:
        k = count_of(self._fraction(rank), numel)
        return numel if 8 * k >= 4 * numel else k  # values without places are no longer, and lose nothing

    def _nbytes(self, numel: int, rank: int) -> int:
        k = self._count(numel, rank)
        return 4 * numel if k == numel else 8 * k

    def _splits(self, numel: int, members: tuple[int, ...], rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Bytes to every member, and from every member."""
        mine = self._nbytes(numel, rank)
        there = tuple(mine if r != rank else 0 for r in members)
        return there, tuple(self._nbytes(numel, r) if r != rank else 0 for r in members)

    def _shares(self, at: ExchangeContext) -> list[float]:
        if not self.tilt:
            return at.shares
        tilted = [w * self._fraction(r) ** self.tilt for w, r in zip(at.shares, at.members, strict=True)]
        return [t / sum(tilted) for t in tilted]

    def _encoded(self, flat: Tensor, at: ExchangeContext, key: Key) -> Tensor:
        k = self._count(flat.numel(), at.rank)
        return pack(flat) if k == flat.numel() else packed(flat, largest(flat, k, key.generator(flat.device)), k)

    def _decoded(self, message: Tensor, k: int) -> _Piece:
        if message.numel() == 4 * k:
            return unpack(message, ((k, torch.float32),))[0], None
        values, where = unpack(message, ((k, torch.float32), (k, torch.int32)))
        return values, where


def _total(like: Tensor, pieces: Sequence[_Piece], shares: Sequence[float]) -> Tensor:
    """sum_i shares[i] pieces[i], spread to their places; in the order given."""
    total = torch.zeros_like(like)
    for (values, where), share in zip(pieces, shares, strict=True):
        if where is None:
            total.add_(values, alpha=share)
        else:
            total.index_add_(0, where, values, alpha=share)
    return total
