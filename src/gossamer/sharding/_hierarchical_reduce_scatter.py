"""Hierarchical reduce-scatter in two hops: inside an island first, then the means of the rows between islands.

Equations (island I of rank i; W_I = sum of w_i over I; rows k belong to the k-th ranks of all islands together):
    m_I[k] = sum_{i in I} (w_i / W_I) D(C(x_i[k]))     at the k-th rank of I, whose own numbers need no code
    mean[k] = sum_I W_I m_I[k]                         by `between`, among the k-th ranks of all islands
    lost_i = x_i - D(C(x_i)) of others' rows, and of its own  (W_k / w_k) lost of `between`;
    owed_i = W_k lost of `between` and what that owes, of its own rows, where w_i = 0
Symbols: C `inside`, D its inverse (the identity where none is given). `between` may be a ReduceScatter: then the k-th
rows are sharded among the k-th ranks, and each gets the mean of its own. With any other exchange all get the mean of k.
The order of a message inside is a permutation of the bucket: all rows of the first owner, of the second, and so on.
Levels:  `island` and `between`. Of every island as many ranks own rows as the smallest has; the others run `between`
on nothing and in a group of one, so that all ranks send as many messages. Where there is no such level, as in local
steps, each group of `all` is an island: mean = m_I, and the state stays what it is.
Wire:    SHUFFLE inside (1 - 1/n_I of an encoded bucket, where n_I ranks own rows), `between` on 1/n_I of a bucket.
State:   that of `between` for the whole bucket, of which owned rows are used.
Paper:   qgZ of Wang et al., ZeRO++, arXiv 2306.10209 (slice reordering, all-to-all in two hops); the two levels of Jia
et al., SDP4Bit, arXiv 2410.15526.
Good when: links between islands are slower than inside.   Not for: states of `between` that are not by number.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gossamer.comm.bucket import Bucket, Entry, Layout, as_computed
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
from gossamer.exchange.islands.island_share import IslandShare, OwnerRange, across, check_across, traffic_across
from gossamer.sharding._reduce_scatter import packed, parts_of, size_of, unpacked
from gossamer.sharding._row_partition import RowPart, rows_of

_BYTES = torch.uint8


@dataclass(frozen=True, slots=True)
class HierarchicalReduceScatter(Exchange):
    """A reduce-scatter by `between` across islands, after one inside each island with the codec `inside` or none.

    Without a codec numbers are sent in the bucket's own type. The bucket holds zeros in other ranks' rows afterwards.
    """

    between: Exchange
    inside: Codec | None = None
    whole: bool = False

    @property
    def traits(self) -> ExchangeTraits:
        return replace(self.between.traits, lossless=self._exact and self.between.traits.lossless)

    @property
    def _exact(self) -> bool:
        return self.inside is None or self.inside.traits.lossless

    def init(self, layout: Layout) -> ExchangeState:
        return ExchangeState(inner=(self.between.init(layout),))

    def owned(self, layout: Layout, levels: ProcessGroups, rank: int) -> dict[str, Tensor]:
        here = self._place(layout, levels, rank)
        parts, mine = parts_of(layout, len(here.runs), whole=self.whole), torch.zeros(layout.numel, dtype=torch.bool)
        for start, numel in parts[here.me] if here.me < len(parts) else ():
            mine[start : start + numel] = True
        return {"0": mine}

    def owner_numels(self, layout: Layout, levels: ProcessGroups) -> tuple[int, ...]:
        return tuple(run.numel for run in self._place(layout, levels, levels.everyone[0]).runs)

    @property
    def divides_by_name(self) -> bool:
        return self.whole

    def run(self, x: Bucket, state: ExchangeState, at: ExchangeContext) -> Rounds:
        here, (inner,) = self._place(x.layout, at.levels, at.rank), state.inner
        parts = parts_of(x.layout, len(here.runs), whole=self.whole)
        own = parts[here.me] if here.me < len(parts) else ()
        lost = torch.zeros_like(x.flat, dtype=torch.float32) if at.accounts and not self.traits.lossless else None
        island = yield from self._reduce(x, here, parts, at, lost)
        sub = Bucket(here.mine.layout, island.to(x.layout.dtype))
        if _is_one(at.levels):
            unpacked(sub.flat, own, x.flat.zero_())
            return Outcome(x.flat, lost, state)
        out = yield from across(self.between, sub, _part(inner, own), at, here)
        unpacked(out.mean, own, x.flat.zero_())
        owed = None
        if lost is not None and out.lost is not None:
            weight = float(here.totals(at.weights)[at.rank])
            if at.share > 0:
                unpacked(out.lost * (weight / at.share), own, lost)
            else:
                owed = torch.zeros_like(lost)
                unpacked(out.lost * weight if out.owed is None else out.owed.add(out.lost, alpha=weight), own, owed)
        return Outcome(x.flat, lost, ExchangeState(inner=(_put_back(inner, own, out.state),)), owed)

    def _reduce(
        self, x: Bucket, here: IslandShare, parts: tuple[RowPart, ...], at: ExchangeContext, lost: Tensor | None
    ) -> Generator[Message, tuple[Tensor, ...], Tensor]:
        """Return the island's mean of this rank's rows, in the dtype of sums; through a codec, in float32."""
        shares, keys = here.shares(at.weights), [key_of(at, x.layout, turn=-1 - k) for k in range(len(parts))]
        there, others = self._inside(here, at.levels), [k for k in range(len(here.island)) if k != here.me]
        sent = [self._message(x.flat, parts[k], keys[k], lost) for k in others if k < len(parts) and parts[k]]
        part = torch.cat(sent) if sent else x.flat.new_empty(0, dtype=x.layout.dtype if self.inside is None else _BYTES)
        (arrived,) = yield Message((part,), there.combine, there.level, there.splits, there.arriving)
        if not here.mine.numel:
            return torch.zeros(0, device=x.flat.device)
        computed = as_computed(x.layout, lossless=self.inside is None)
        total = packed(x.flat, parts[here.me], here.mine.numel).to(computed.dtype) * shares[here.me]
        for k, message in zip(others, arrived.view(len(others), self._size(here.mine)), strict=True):
            if self.inside is None:
                total.add_(message, alpha=shares[k])
            else:
                self.inside.add(total, message, shares[k], keys[here.me])
        return total

    def _message(self, flat: Tensor, part: RowPart, key: Key, lost: Tensor | None) -> Tensor:
        """Return an owner's rows as they are sent; their compression error is written to `lost`."""
        rows = packed(flat, part, size_of(part))
        if self.inside is None:
            return rows
        rows = rows.float()
        if lost is None:
            return self.inside.encode(rows, key)
        message = self.inside.encode_losing(rows, key, rows)
        unpacked(rows, part, lost)
        return message

    def rounding_error_weight(self, at: ExchangeContext) -> float:
        """Return this rank's part of the rounding error: all of it on its island, divided over islands as `between`
        does.
        """
        if _is_one(at.levels):
            return 1.0
        islands = at.levels.groups["island"]
        weights = [float(at.weights[list(island)].sum()) for island in islands]
        mine = islands.index(at.levels.group("island", at.rank))
        level = ProcessGroups({"all": (tuple(range(len(islands))),)})
        return self.between.rounding_error_weight(replace(at, rank=mine, levels=level, weights=torch.tensor(weights)))

    def traffic(self, layout: Layout, levels: ProcessGroups, rank: int) -> tuple[Traffic, ...]:
        return self.expected_traffic(layout, levels, rank, 1.0)

    def expected_traffic(
        self, layout: Layout, levels: ProcessGroups, rank: int, occupied: float
    ) -> tuple[Traffic, ...]:
        here = self._place(layout, levels, rank)
        far = () if _is_one(levels) else traffic_across(self.between, here, rank, occupied)
        return (self._inside(here, levels), *far)

    def for_island(self) -> Exchange:
        """Return the reduce-scatter inside the island alone, without a state."""
        return replace(self, between=Dense())

    def check(self, layout: Layout, levels: ProcessGroups) -> None:
        if not _is_one(levels):
            check_across(self.between, layout, levels, self._dealt)
        if self.inside is not None:
            check_width(layout, self.inside)

    def _inside(self, here: IslandShare, levels: ProcessGroups) -> Traffic:
        """Return the message inside the island."""
        sizes = [self._size(run) for run in (*here.runs, *(here.nobody for _ in here.island[len(here.runs) :]))]
        splits = tuple(0 if k == here.me else size for k, size in enumerate(sizes))
        arriving = tuple(0 if k == here.me else sizes[here.me] for k in range(len(sizes)))
        itemsize = here.whole.dtype.itemsize if self.inside is None else 1
        level = "all" if _is_one(levels) else "island"
        return Traffic(Collective.SHUFFLE, sum(splits), itemsize, level, splits, arriving)

    def _size(self, run: OwnerRange) -> int:
        """Return the elements of the message about a range: numbers, or encoded bytes."""
        return run.numel if self.inside is None or not run.numel else self.inside.nbytes(run.numel)

    def _place(self, layout: Layout, levels: ProcessGroups, rank: int) -> IslandShare:
        if _is_one(levels):  # keep all islands, so that rows have the same owners as in synchronous steps
            levels = ProcessGroups({"all": (levels.everyone,), "island": levels.groups["all"]})
        return IslandShare.of(layout, levels, rank, self._dealt)

    def _dealt(self, layout: Layout, owners: int) -> tuple[OwnerRange, ...]:
        return dealt(layout, owners, whole=self.whole)


def _is_one(levels: ProcessGroups) -> bool:
    """Return whether the gradients are averaged within one island only."""
    return "island" not in levels.groups


def dealt(layout: Layout, owners: int, *, whole: bool = False) -> tuple[OwnerRange, ...]:
    """Return the rows of every owner, one owner after the other: their ranges in the reordered bucket."""
    found, start = [], 0
    for owner in range(owners):
        entries, numel = [], 0
        for e in layout.entries:
            rows = rows_of(e.name, e.shape, owners, whole=whole)[owner]
            shape = e.shape if rows.count == (e.shape[0] if e.shape else 1) else (rows.count, *e.shape[1:])
            entry = Entry(e.name, shape, numel)
            if rows.count and entry.numel:
                entries.append(entry)
                numel += entry.numel
        found.append(OwnerRange(start, start + numel, replace(layout, entries=tuple(entries))))
        start += numel
    return tuple(found)


def is_by_number(exchange: Exchange) -> bool:
    """Return whether all state of an exchange has one number per element of the bucket, so that rows can be cut out."""
    where = Layout((Entry("x", (6, 5), 0),), torch.float32)
    return all(tensor.shape == (where.numel,) for _, tensor in exchange.init(where).flatten())


def _part(state: ExchangeState, own: RowPart) -> ExchangeState:
    """Return the state of this rank's rows, out of a bucket's state."""
    tensors = {name: packed(tensor, own, size_of(own)) for name, tensor in state.tensors.items()}
    return ExchangeState(tensors, tuple(_part(inner, own) for inner in state.inner))


def _put_back(state: ExchangeState, own: RowPart, part: ExchangeState) -> ExchangeState:
    """Return `state` with the state of this rank's rows replaced, as a new one."""
    tensors = {name: tensor.clone() for name, tensor in state.tensors.items()}
    for name, tensor in part.tensors.items():
        unpacked(tensor, own, tensors[name])
    inner = tuple(_put_back(a, own, b) for a, b in zip(state.inner, part.inner, strict=True))
    return ExchangeState(tensors, inner)
