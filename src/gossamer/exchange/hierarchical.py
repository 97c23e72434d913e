"""Hierarchical: exact inside an island, another exchange between islands, where the links are slow.

Equations (island I of rank i; W_I = sum of w_i over I; every owner o of an island for its own entries of the bucket):
    m_I    = sum_{i in I} (w_i / W_I) D(C(x_i))       summed by the owner, in rank order
    M      = sum_I W_I (m_I - lost_I)                 by `inter`, among the owners of the same entries in all islands
    mean   = D(C(M))                                  sent by the owners to the ranks of their islands
    lost_i = x_i - D(C(x_i)), and at the owner  + (W_I / w_o) (lost_I + M - mean);
    owed_o = W_I (lost_I + M - mean) + owed_I  where w_o = 0
Symbols: x_i (numel,) input of rank i; w_i its weight; C `intra_codec`, D its inverse (the identity where none is
given).
Levels:  `island` and `between` (see comm.message.ProcessGroups.islands). Of every island as many ranks own entries
as the smallest has; the others run `inter` on nothing and in a group of one, so that all ranks send as many messages.
Wire:    SHUFFLE inside (1 - 1/n of a bucket on every rank), `inter` on 1/owners of a bucket, SHUFFLE inside.
State:   that of `inter` for the whole bucket, of which owned entries are used.   Work: 2 numel flop and inter's.
Paper:   the hierarchical all-reduce of NCCL and Horovod; lossy between nodes alone: ZeRO++, arXiv 2306.10209.
Good when: links inside islands are fast.   Not for: one giant entry (an entry has one owner).   Feedback belongs into
`inter`; around all of it, an owner's residual carries the losses of its whole island.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
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
from gossamer.exchange.codec import Codec, check_width
from gossamer.exchange.dense import Dense
from gossamer.exchange.islands.island_share import (
    IslandShare,
    across,
    check_across,
    cut,
    part_of,
    put_back,
    traffic_across,
)
from gossamer.exchange.two_shot import TwoShot
from gossamer.spec.errors import bad_input

_Turns = Generator[Message, tuple[Tensor, ...], Tensor]


class _Form(ABC):
    """The form in which numbers travel inside an island."""

    @abstractmethod
    def size(self, numel: int) -> int:
        """Return the elements of the message about a range of `numel` numbers."""

    @abstractmethod
    def itemsize(self, whole: torch.dtype) -> int:
        """Return the bytes of an element of a message about numbers of type `whole`."""

    @abstractmethod
    def sent(self, flat: Tensor, here: IslandShare, keys: list[Key]) -> Tensor:
        """Return the message about all ranges of a bucket."""

    @abstractmethod
    def answer(self, mine: Tensor, key: Key) -> Tensor:
        """Return the message about an owner's own range."""

    @abstractmethod
    def mean(self, rows: Tensor, numel: int, shares: list[float], key: Key) -> Tensor:
        """Return the weighted mean of the messages `rows` about one range, float32."""

    @abstractmethod
    def read(self, message: Tensor, here: IslandShare, keys: list[Key]) -> Tensor:
        """Return the bucket that a message of all ranges holds."""


@dataclass(frozen=True, slots=True)
class _AsTheyAre(_Form):
    """The numbers themselves."""

    def size(self, numel: int) -> int:
        return numel

    def itemsize(self, whole: torch.dtype) -> int:
        return whole.itemsize

    def sent(self, flat: Tensor, here: IslandShare, keys: list[Key]) -> Tensor:
        return flat

    def answer(self, mine: Tensor, key: Key) -> Tensor:
        return mine

    def mean(self, rows: Tensor, numel: int, shares: list[float], key: Key) -> Tensor:
        total = torch.zeros(numel, dtype=sum_dtype(rows.dtype), device=rows.device)
        for row, share in zip(rows, shares, strict=True):
            total.add_(row, alpha=share)
        return total

    def read(self, message: Tensor, here: IslandShare, keys: list[Key]) -> Tensor:
        return message


@dataclass(frozen=True, slots=True)
class _Coded(_Form):
    """The bytes of a codec, range by range; an empty range is an empty message."""

    codec: Codec

    def size(self, numel: int) -> int:
        return self.codec.nbytes(numel) if numel else 0

    def itemsize(self, whole: torch.dtype) -> int:
        return 1

    def sent(self, flat: Tensor, here: IslandShare, keys: list[Key]) -> Tensor:
        parts = [flat.new_empty(0, dtype=torch.uint8)]
        for run, key in zip(here.runs, keys, strict=False):
            parts += [self.codec.encode(flat[run.slice].float(), key)] if run.numel else []
        return torch.cat(parts)

    def answer(self, mine: Tensor, key: Key) -> Tensor:
        return self.codec.encode(mine.float(), key) if mine.numel() else mine.new_empty(0).byte()

    def mean(self, rows: Tensor, numel: int, shares: list[float], key: Key) -> Tensor:
        return self.codec.mean(rows, numel, shares, key) if numel else torch.zeros(0, device=rows.device)

    def read(self, message: Tensor, here: IslandShare, keys: list[Key]) -> Tensor:
        pieces = torch.split(message, [self.size(run.numel) for run in here.runs])
        found = [torch.empty(0, device=message.device)]
        for piece, run, key in zip(pieces, here.runs, keys, strict=False):
            found += [self.codec.decode(piece, run.numel, key)] if run.numel else []
        return torch.cat(found)


def _own_key(here: IslandShare, keys: list[Key]) -> Key:
    """Return the key of this rank's own range; that of the last range for a rank that owns none, which needs no key."""
    return keys[min(here.me, len(here.runs) - 1)]


@dataclass(frozen=True, slots=True)
class Hierarchical(Exchange):
    """An exchange with `inter` across islands, and exact inside an island unless the codec `intra_codec` is given."""

    inter: Exchange
    intra_codec: Codec | None = None

    def __post_init__(self) -> None:
        if self.intra_codec is not None and not self.intra_codec.traits.fixed_size:
            raise bad_input(
                wanted="a codec whose messages have a fixed size",
                got=repr(self.intra_codec),
                do="set intra_codec to bfloat16 or float16, or remove it",
                key="intra_codec",
            )

    @property
    def traits(self) -> ExchangeTraits:
        return replace(self.inter.traits, lossless=self._exact and self.inter.traits.lossless)

    @property
    def needs_islands(self) -> bool:
        return True

    @property
    def _form(self) -> _Form:
        return _AsTheyAre() if self.intra_codec is None else _Coded(self.intra_codec)

    @property
    def _exact(self) -> bool:
        return self.intra_codec is None or self.intra_codec.traits.lossless

    def init(self, layout: Layout) -> ExchangeState:
        return ExchangeState(inner=(self.inter.init(layout),))

    def owned(self, layout: Layout, levels: ProcessGroups, rank: int) -> dict[str, Tensor]:
        mine = torch.zeros(layout.numel, dtype=torch.bool)
        mine[IslandShare.of(layout, levels, rank).mine.slice] = True
        return {"0": mine}

    def owner_numels(self, layout: Layout, levels: ProcessGroups) -> tuple[int, ...]:
        return tuple(run.numel for run in cut(layout, len(levels.owners_by_island[0])))

    def run(self, x: Bucket, state: ExchangeState, at: ExchangeContext) -> Rounds:
        here, (inner,) = IslandShare.of(x.layout, at.levels, at.rank), state.inner
        keys = [key_of(at, x.layout, turn=-1 - k) for k in range(2 * len(here.runs))]  # there, then back
        form = self._form
        sent = form.sent(x.flat, here, keys)
        island = yield from self._reduce(sent, here, at, keys)
        sub = Bucket(here.mine.layout, island.to(x.layout.dtype))
        out = yield from across(self.inter, sub, part_of(inner, here), at, here)
        mean = yield from self._spread(out.mean, here, keys)
        lost = owed = None
        if at.accounts and (out.lost is not None or not self._exact):
            lost = x.flat.float() - form.read(sent, here, keys).float()
            later = out.mean.float() - mean[here.mine.slice].float()
            later += 0.0 if out.lost is None else out.lost
            weight = float(here.totals(at.weights)[at.rank])
            if at.share > 0:
                lost[here.mine.slice].add_(later, alpha=weight / at.share)
            else:
                owed = torch.zeros_like(lost)
                owed[here.mine.slice] = later.mul_(weight) if out.owed is None else out.owed.add(later, alpha=weight)
        return Outcome(mean, lost, ExchangeState(inner=(put_back(inner, here, out.state),)), owed)

    def _reduce(self, sent: Tensor, here: IslandShare, at: ExchangeContext, keys: list[Key]) -> _Turns:
        """Return the island's mean of this rank's entries, in float32."""
        there, _ = self._inside(here)
        (arrived,) = yield Message((sent,), Collective.SHUFFLE, "island", there.splits, there.arriving)
        rows = arrived.view(len(here.island), self._form.size(here.mine.numel))
        return self._form.mean(rows, here.mine.numel, here.shares(at.weights), _own_key(here, keys))

    def _spread(self, mine: Tensor, here: IslandShare, keys: list[Key]) -> _Turns:
        """Gather the mean of all entries from the owners in the island."""
        _, back = self._inside(here)
        agreed = [Key(k.shared, k.shared) for k in keys[len(here.runs) :]]  # all islands must decode the same bits
        form = self._form
        answer = form.answer(mine, _own_key(here, agreed))
        part = answer.repeat(len(here.island))
        (arrived,) = yield Message((part,), Collective.SHUFFLE, "island", back.splits, back.arriving)
        return form.read(arrived, here, agreed).to(here.whole.dtype)

    def traffic(self, layout: Layout, levels: ProcessGroups, rank: int) -> tuple[Traffic, ...]:
        return self.expected_traffic(layout, levels, rank, 1.0)

    def expected_traffic(
        self, layout: Layout, levels: ProcessGroups, rank: int, occupied: float
    ) -> tuple[Traffic, ...]:
        here = IslandShare.of(layout, levels, rank)
        there, back = self._inside(here)
        return (there, *traffic_across(self.inter, here, rank, occupied), back)

    def for_island(self) -> Exchange:
        """Return an all-reduce, or two_shot with the codec `intra_codec`."""
        return Dense() if self.intra_codec is None else TwoShot(self.intra_codec)

    def check(self, layout: Layout, levels: ProcessGroups) -> None:
        check_across(self.inter, layout, levels)
        if self.intra_codec is not None:
            check_width(layout, self.intra_codec)

    def _inside(self, here: IslandShare) -> tuple[Traffic, Traffic]:
        """Return the messages inside the island: to the owners, and from them."""
        form = self._form
        everyone = (form.size(here.mine.numel),) * len(here.island)
        owners = tuple(form.size(run.numel) for run in here.runs) + (0,) * (len(here.island) - len(here.runs))
        size = form.itemsize(here.whole.dtype)
        return (
            Traffic(Collective.SHUFFLE, sum(owners), size, "island", owners, everyone),
            Traffic(Collective.SHUFFLE, sum(everyone), size, "island", everyone, owners),
        )
