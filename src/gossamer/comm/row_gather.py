"""Gather a row of every rank in few hops: ceil(log2 n) messages, where a ring has n - 1, one after the other.

After messages to the ranks 1, 2, 4, ... before it, rank r holds the rows of as many ranks from r on (Bruck et al., IEEE
TPDS 8(11), 1997). A rank sends n - 1 rows, as over a ring, but not to its neighbor alone. What is gathered in every
step is a few numbers, so on long lines the hops are what it takes.

Among islands of several ranks rows go over a ring, in the order of the ranks: it crosses from island to island once,
with n - 1 rows, where many ranks of an island would send theirs over its one way out.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gossamer.comm.message import Collective, ExchangeState, Message, Outcome, ProcessGroups, Rounds, Traffic


def gather_rounds(levels: ProcessGroups, level: str, rank: int) -> int:
    """Return the number of messages of `gather_rows`."""
    group = levels.group(level, rank)
    return 1 if _goes_round(levels, group) else _doublings(len(group))


def gather_hops(levels: ProcessGroups, level: str, rank: int) -> tuple[int, int]:
    """Return how many hops of `gather_rows` wait for one another: from island to island, and inside islands.

    All of them are the former where there are no islands of several ranks.
    """
    group, islands = levels.group(level, rank), len(levels.groups.get("island", ()))
    return (islands, len(group) - 1 - islands) if _goes_round(levels, group) else (_doublings(len(group)), 0)


def gather_rows(mine: Tensor, levels: ProcessGroups, level: str, rank: int) -> Rounds:
    """All-gather `mine` over the ranks at `level`; the outcome's mean are the rows of all, (ranks, *mine.shape).

    A rank has all rows only after every rank has begun.
    """
    group = levels.group(level, rank)
    if _goes_round(levels, group):
        (found,) = yield Message((mine,), Collective.GATHER, level)
        return Outcome(found, None, ExchangeState())
    ranks, me, rows = len(group), group.index(rank), mine.unsqueeze(0)
    while (held := len(rows)) < ranks:
        count = min(held, ranks - held)
        splits, arriving = (_only((me + way * held) % ranks, count, ranks) for way in (-1, 1))
        (got,) = yield Message((rows[:count],), Collective.SHUFFLE, level, splits, arriving)
        rows = torch.cat([rows, got])
    return Outcome(rows.roll(me, 0), None, ExchangeState())


def row_traffic(numel: int, itemsize: int, levels: ProcessGroups, level: str, rank: int) -> Iterator[Traffic]:
    """Yield the messages of `gather_rows` for a row of `numel` numbers of `itemsize` bytes."""
    group = levels.group(level, rank)
    if _goes_round(levels, group):
        yield Traffic(Collective.GATHER, numel, itemsize, level)
        return
    ranks, me, held = len(group), group.index(rank), 1
    while held < ranks:
        count = min(held, ranks - held)
        splits, arriving = (_only((me + way * held) % ranks, count * numel, ranks) for way in (-1, 1))
        yield Traffic(Collective.SHUFFLE, count * numel, itemsize, level, splits, arriving)
        held += count


def _only(place: int, count: int, ranks: int) -> tuple[int, ...]:
    """Return `count` for the rank at `place`, and 0 for all others."""
    return (0,) * place + (count,) + (0,) * (ranks - place - 1)


def _doublings(ranks: int) -> int:
    return (ranks - 1).bit_length()


def _goes_round(levels: ProcessGroups, group: tuple[int, ...]) -> bool:
    """Return whether some ranks of the group share an island, and not all of them."""
    home = {rank: number for number, island in enumerate(levels.groups.get("island", ())) for rank in island}
    return 1 < len({home.get(rank, -1 - rank) for rank in group}) < len(group)
