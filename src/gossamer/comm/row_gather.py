"""Gather a row of every rank in few hops: ceil(log2 n) messages, where a ring has n - 1, one after the other.

After messages to the ranks 1, 2, 4, ... before it, rank r holds the rows of as many ranks from r on (Bruck et al., IEEE
TPDS 8(11), 1997). A rank sends n - 1 rows, as over a ring. What is gathered in every step is a few numbers, so on long
lines the hops are what it takes.
"""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor

from gossamer.comm.message import Collective, Message, Traffic


def gather_rounds(ranks: int) -> int:
    """Return the number of messages that a rank sends, which wait for one another."""
    return (ranks - 1).bit_length()


def gather_rows(
    mine: Tensor, group: tuple[int, ...], rank: int, level: str
) -> Generator[Message, tuple[Tensor, ...], Tensor]:
    """All-gather `mine` over the ranks of `group`, which meet at `level`; return the rows of all, (ranks, *mine.shape).

    A rank has all rows only after every rank has begun.
    """
    ranks, me, rows = len(group), group.index(rank), mine.unsqueeze(0)
    while (held := len(rows)) < ranks:
        count = min(held, ranks - held)
        to, source = (me - held) % ranks, (me + held) % ranks
        splits, arriving = (tuple(count * (peer == one) for peer in range(ranks)) for one in (to, source))
        (got,) = yield Message((rows[:count],), Collective.SHUFFLE, level, splits, arriving)
        rows = torch.cat([rows, got])
    return rows.roll(me, 0)


def traffic_of_rows(mine: Tensor, group: tuple[int, ...], rank: int, level: str) -> tuple[Traffic, ...]:
    """Return the messages of `gather_rows` for a row like `mine`, which may be on the device meta."""
    method, found = gather_rows(mine, group, rank, level), list[Traffic]()
    try:
        message = next(method)
        while True:
            found.append(Traffic.of(message))
            message = method.send((mine.new_empty((sum(message.arriving or ()), *mine.shape)),))
    except StopIteration:
        return tuple(found)
