"""All-gather of sharded rows, level by level, the last level of the partition first."""

from __future__ import annotations

from collections.abc import Generator
from math import prod

from torch import Tensor

from gossamer.comm.bucket import Layout
from gossamer.comm.message import Collective, Message, Traffic
from gossamer.sharding._reduce_scatter import most
from gossamer.sharding._row_partition import RowPartition


def longest_message_numel(layout: Layout, deal: RowPartition, rank: int) -> int:
    """Return the most elements of a bucket that any giver of `rank` has: every giver sends a message of that length."""
    return most([deal.part(layout, giver) for giver in deal.givers(rank)])


def collecting(deal: RowPartition, rank: int, length: int, itemsize: int) -> tuple[Traffic, ...]:
    """Return the messages that gather `length` elements of every giver, the last level of the path first.

    Where only some ranks of a group own rows, these send them to each of the others.
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
    """Gather every giver's `mine`, of the same length on all of them, and return (givers, length)."""
    found = mine
    for turn in collecting(deal, rank, length, mine.element_size()):
        copies = 1 if turn.splits is None else sum(map(bool, turn.splits))
        part = found.flatten() if copies == 1 else found.flatten().repeat(copies)
        (found,) = yield Message((part,), turn.combine, turn.level, turn.splits, turn.arriving)
    return found.view(len(deal.givers(rank)), length)
