"""The way back of rows that were dealt out: level by level, the last one first, each rank comes to have its givers'."""

from __future__ import annotations

from collections.abc import Generator
from math import prod

from torch import Tensor

from gossamer.comm.bucket import Layout
from gossamer.comm.message import Collective, Message, Traffic
from gossamer.sharding._reduce_scatter import most
from gossamer.sharding._row_partition import RowPartition


def longest(layout: Layout, deal: RowPartition, rank: int) -> int:
    """Elements of a bucket that the giver has who has most: as long is what each of them sends."""
    return most([deal.part(layout, giver) for giver in deal.givers(rank)])


def collecting(deal: RowPartition, rank: int, length: int, itemsize: int) -> tuple[Traffic, ...]:
    """The messages by which every rank comes to have those of `length` elements of all givers: the last level of the
    path first. Where only some of a group have anything, these send it to each of the others.
    """
    found = []
    for depth, level in reversed(list(enumerate(deal.back))):
        group, owners = deal.levels.group(level, rank), deal.owners(level, rank)
        block = length * prod(len(deal.owners(deeper, owners[0])) for deeper in deal.back[depth + 1 :])
        if owners == group:
            found.append(Traffic(Collective.GATHER, block, itemsize, level))
            continue
        splits = (block if rank in owners else 0,) * len(group)
        arriving = tuple(block if peer in owners else 0 for peer in group)
        found.append(Traffic(Collective.SHUFFLE, sum(splits), itemsize, level, splits, arriving))
    return tuple(found)


def collected(
    deal: RowPartition, rank: int, mine: Tensor, length: int
) -> Generator[Message, tuple[Tensor, ...], Tensor]:
    """(givers, length): every giver's `mine`, which has the same length on all of them."""
    found = mine
    for turn in collecting(deal, rank, length, mine.element_size()):
        copies = 1 if turn.splits is None else sum(map(bool, turn.splits))
        part = found.flatten() if copies == 1 else found.flatten().repeat(copies)
        (found,) = yield Message((part,), turn.combine, turn.level, turn.splits, turn.arriving)
    return found.view(len(deal.givers(rank)), length)
