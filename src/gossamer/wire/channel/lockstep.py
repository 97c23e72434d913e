"""Lockstep: all ranks in one process, taking turns. Sums run in rank order, in the parts' own type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gossamer.spec.errors import WireMismatch
from gossamer.wire.channel import Channel, Pending
from gossamer.wire.message import Combine, Levels, Message, Outcome, Rounds
from gossamer.wire.meter import Meter


@dataclass(slots=True)
class _Post:
    """Where the messages of one group and turn meet."""

    messages: dict[int, Message] = field(default_factory=dict)
    replies: dict[int, tuple[Tensor, ...]] | None = None


class _Deposited(Pending):
    def __init__(self, post: _Post, group: tuple[int, ...], rank: int) -> None:
        self._post, self._group, self._rank = post, group, rank

    def wait(self) -> tuple[Tensor, ...]:
        missing = [r for r in self._group if r not in self._post.messages]
        assert not missing, f"ranks {missing} have not sent yet: drive all ranks before waiting"
        if self._post.replies is None:
            self._post.replies = combine(self._post.messages, self._group)
        return self._post.replies[self._rank]


class Lockstep(Channel):
    """The channel of one rank; `Lockstep.world` makes all of them."""

    def __init__(self, rank: int, levels: Levels, posts: dict[tuple[tuple[int, ...], str, int], _Post]) -> None:
        self.rank, self.levels, self.meter = rank, levels, Meter(rank)
        self._posts = posts
        self._turns: dict[tuple[tuple[int, ...], str], int] = {}

    @staticmethod
    def world(ranks: int, levels: Levels | None = None) -> list[Lockstep]:
        """One channel per rank, joined with each other."""
        posts: dict[tuple[tuple[int, ...], str, int], _Post] = {}
        levels = levels or Levels.flat(ranks)
        return [Lockstep(rank, levels, posts) for rank in range(ranks)]

    def start(self, message: Message) -> Pending:
        group = self.levels.group(message.level, self.rank)
        self.meter.count(message, group)
        turn = self._turns.get((group, message.level), 0)
        self._turns[group, message.level] = turn + 1
        post = self._posts.setdefault((group, message.level, turn), _Post())
        post.messages[self.rank] = message
        if len(post.messages) == len(group):
            del self._posts[group, message.level, turn]  # complete: only its waiters need it now
        return _Deposited(post, group, self.rank)

    def close(self) -> None:
        self._posts.clear()


def combine(messages: dict[int, Message], group: Sequence[int]) -> dict[int, tuple[Tensor, ...]]:
    """The replies to every rank of `group`; raises WireMismatch when shapes, types or ways of combining differ."""
    first = messages[group[0]]
    if any(m.splits is not None for m in messages.values()):
        return _shuffled_unevenly(messages, group)
    for rank in group[1:]:
        other = messages[rank]
        if _signature(other) != _signature(first):
            raise WireMismatch(f"rank {rank} sent {_signature(other)}, rank {group[0]} sent {_signature(first)}")
    columns = [[messages[r].parts[i] for r in group] for i in range(len(first.parts))]
    if first.combine is Combine.SHUFFLE:
        return {r: tuple(torch.stack([part[me] for part in c]) for c in columns) for me, r in enumerate(group)}
    shared = tuple(_reduce(column, first.combine) for column in columns)
    return {r: tuple(t.clone() for t in shared) for r in group}


def _shuffled_unevenly(messages: dict[int, Message], group: Sequence[int]) -> dict[int, tuple[Tensor, ...]]:
    for me, rank in enumerate(group):
        for i, peer in enumerate(group):
            sent, awaited = _rows(messages[peer].splits, me), _rows(messages[rank].arriving, i)
            if sent != awaited:
                raise WireMismatch(f"rank {peer} sends {sent} rows to rank {rank}, which awaits {awaited}")
    parts = len(messages[group[0]].parts)
    pieces = {r: [torch.split(p, list(messages[r].splits or ())) for p in messages[r].parts] for r in group}
    return {r: tuple(torch.cat([pieces[s][i][me] for s in group]) for i in range(parts)) for me, r in enumerate(group)}


def _rows(splits: tuple[int, ...] | None, index: int) -> int:
    if splits is None:
        raise WireMismatch("some ranks sent an even shuffle and some an uneven one")
    return splits[index]


def _reduce(column: list[Tensor], how: Combine) -> Tensor:
    if how is Combine.GATHER:
        return torch.stack(column)
    total = column[0].clone()
    for part in column[1:]:
        total = _both(total, part, how)
    return total


def _both(a: Tensor, b: Tensor, how: Combine) -> Tensor:
    if how is Combine.SUM:
        return a + b
    return torch.maximum(a, b) if how is Combine.MAX else a | b


def _signature(message: Message) -> tuple[object, ...]:
    return (message.combine.value, *((tuple(p.shape), str(p.dtype)) for p in message.parts))


def run_lockstep(channels: Sequence[Channel], methods: Sequence[Rounds]) -> list[Outcome]:
    """Drive one exchange per rank to its end, in turns. All ranks must want the same number of rounds."""
    outcomes: dict[int, Outcome] = {}
    wanted: dict[int, Message] = {}
    for rank, method in enumerate(methods):
        _advance(rank, method, None, wanted, outcomes)
    while wanted:
        if len(wanted) != len(methods):
            raise WireMismatch(f"ranks {sorted(outcomes)} are done while ranks {sorted(wanted)} still send")
        pending = {rank: channels[rank].start(message) for rank, message in wanted.items()}
        replies = {rank: p.wait() for rank, p in pending.items()}
        wanted = {}
        for rank, reply in replies.items():
            _advance(rank, methods[rank], reply, wanted, outcomes)
    return [outcomes[rank] for rank in range(len(methods))]


def _advance(
    rank: int,
    method: Rounds,
    reply: tuple[Tensor, ...] | None,
    wanted: dict[int, Message],
    outcomes: dict[int, Outcome],
) -> None:
    try:
        wanted[rank] = next(method) if reply is None else method.send(reply)
    except StopIteration as end:
        outcomes[rank] = end.value
