"""Reduce-scatter of a bucket: every rank gets the mean of its own rows, and of no others.

Equations (n ranks, rows r belong to rank r):
    mean[r] = w_r x_r[r] + sum_{i != r} w_i D(C(x_i[r])),   on rank r alone
    lost_i = x_i - D(C(x_i)), zero on its own rows
Wire:    SHUFFLE of n messages, each as long as the largest rank's rows: (n-1)/n of an encoded bucket, half of what an
all-reduce sends, and half of what gloo's reduce-scatter does.   State: none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.comm.bucket import Bucket, Layout, as_computed
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
from gossamer.comm.random_key import key_of
from gossamer.exchange import Exchange, ExchangeTraits
from gossamer.exchange.codec import Codec, check_width
from gossamer.sharding._row_partition import RowPart, RowPartition
from gossamer.spec.errors import bad_input


@dataclass(frozen=True, slots=True)
class ReduceScatter(Exchange):
    """A reduce-scatter in the bucket's own type, or through a codec; it zeroes other ranks' rows of the bucket."""

    codec: Codec | None = None
    whole: bool = False

    @property
    def traits(self) -> ExchangeTraits:
        return ExchangeTraits(lossless=self.codec is None or self.codec.traits.lossless)

    @property
    def divides_by_name(self) -> bool:
        return self.whole

    def init(self, layout: Layout) -> ExchangeState:
        return ExchangeState()

    def run(self, x: Bucket, state: ExchangeState, at: ExchangeContext) -> Rounds:
        parts, me = parts_of(x.layout, len(at.members), whole=self.whole), at.place
        rows = torch.stack([packed(x.flat, part, most(parts)) for part in parts])  # (ranks, most)
        computed = as_computed(x.layout, lossless=self.codec is None)
        own = rows[me].to(computed.dtype) * at.share  # a copy: the rows become what is lost
        sent, key, lost = rows, key_of(at, x.layout), None
        if self.codec is not None:
            lost = rows.float()
            sent = self.codec.encode_losing(lost, key, lost)
            lost[me] = 0
        (arrived,) = yield Message((sent,), Collective.SHUFFLE)
        for place, share in enumerate(at.shares):
            if place == me:
                continue
            if self.codec is None:
                own.add_(arrived[place], alpha=share)
            else:
                self.codec.add(own, arrived[place], share, key)
        unpacked(own.to(x.flat.dtype), parts[me], x.flat.zero_())
        return Outcome(x.flat, None if lost is None or not at.accounts else spread(lost, parts, x.flat), state)

    def rounding_error_weight(self, at: ExchangeContext) -> float:
        """Return 1: no other rank has the mean of this rank's rows."""
        return 1.0

    def traffic(self, layout: Layout, levels: ProcessGroups, rank: int) -> tuple[Traffic, ...]:
        parts = parts_of(layout, len(levels.group("all", rank)), whole=self.whole)
        if self.codec is None:
            return (Traffic(Collective.SHUFFLE, len(parts) * most(parts), layout.dtype.itemsize),)
        return (Traffic(Collective.SHUFFLE, len(parts) * self.codec.nbytes(most(parts)), 1),)

    def check(self, layout: Layout, levels: ProcessGroups) -> None:
        if self.codec is not None and not self.codec.traits.fixed_size:
            do = "choose bfloat16, float16, int8 or int4"
            raise bad_input(wanted="a codec whose messages have a fixed size", got=repr(self.codec), do=do)
        if self.codec is not None:
            check_width(layout, self.codec)


def parts_of(layout: Layout, ranks: int, *, whole: bool = False) -> tuple[RowPart, ...]:
    """Return the ranges of every rank's rows in a bucket, by rank; `whole`: as in RowPartition."""
    deal = RowPartition(ProcessGroups.flat(ranks), ("all",), whole=whole)
    return tuple(deal.part(layout, rank) for rank in range(ranks))


def size_of(part: RowPart) -> int:
    """Return the number of elements of a rank's rows."""
    return sum(numel for _, numel in part)


def most(parts: Sequence[RowPart]) -> int:
    """Return the largest number of elements of any rank."""
    return max(map(size_of, parts))


def packed(flat: Tensor, part: RowPart, length: int) -> Tensor:
    """Return one rank's rows of `flat`, one behind the other, zero-padded to (length,)."""
    row = flat.new_zeros(length)
    torch.cat([flat[at : at + n] for at, n in part] or [flat[:0]], out=row[: size_of(part)])
    return row


def unpacked(row: Tensor, part: RowPart, flat: Tensor) -> None:
    """Copy one rank's rows back to their ranges in `flat`."""
    done = 0
    for at, numel in part:
        flat[at : at + numel] = row[done : done + numel]
        done += numel


def spread(rows: Tensor, parts: tuple[RowPart, ...], like: Tensor) -> Tensor:
    """Return all ranks' rows as one flat float32 buffer."""
    flat = torch.zeros_like(like, dtype=torch.float32)
    for row, part in zip(rows, parts, strict=True):
        unpacked(row, part, flat)
    return flat
