"""Lockstep: all ranks in one process, taking turns. Sums run in rank order, in the parts' own dtype.

The messages of one group and turn are collected in a post. An uneven all-to-all is point-to-point, as over process
groups: one letter from every rank to every other that it has rows for, in the order of sending. The group's other ranks
need not take part.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gossamer.comm.channel import Channel, Pending
from gossamer.comm.message import Collective, Message, Outcome, ProcessGroups, Rounds
from gossamer.comm.meter import Meter
from gossamer.spec.errors import PeerLost, WireMismatch


@dataclass(slots=True)
class _Post:
    """The messages of one group and turn, and the replies."""

    messages: dict[int, Message] = field(default_factory=dict)
    replies: dict[int, tuple[Tensor, ...]] | None = None


_Letter = tuple[str, int, int, int]  # level, from, to, number


@dataclass(slots=True)
class _Office:
    """The messages in flight between the ranks of one process."""

    patience_s: float
    posts: dict[tuple[tuple[int, ...], str, int], _Post] = field(default_factory=dict)
    letters: dict[_Letter, tuple[Tensor, ...]] = field(default_factory=dict)
    news: threading.Condition = field(default_factory=threading.Condition)

    def await_(self, missing: Callable[[], list[int]]) -> None:
        """Wait, holding the condition `news`, until `missing` returns no rank any more."""
        if self.news.wait_for(lambda: not missing(), self.patience_s):
            return
        assert self.patience_s, f"ranks {missing()} have not sent yet: drive all ranks before waiting"
        raise PeerLost(f"ranks {missing()} sent nothing for {self.patience_s:g} s")


class _Deposited(Pending):
    def __init__(self, office: _Office, post: _Post, group: tuple[int, ...], rank: int) -> None:
        self._office, self._post, self._group, self._rank = office, post, group, rank

    def wait(self) -> tuple[Tensor, ...]:
        with self._office.news:
            self._office.await_(lambda: [r for r in self._group if r not in self._post.messages])
            if self._post.replies is None:
                self._post.replies = combine(self._post.messages, self._group)
            return self._post.replies[self._rank]


@dataclass(slots=True)
class _Awaited(Pending):
    """The letters of one uneven shuffle. `letters` has one from every peer that sends; `mine` is what I keep."""

    office: _Office
    message: Message
    letters: dict[int, _Letter]
    group: tuple[int, ...]
    rank: int
    mine: tuple[Tensor, ...]

    def wait(self) -> tuple[Tensor, ...]:
        with self.office.news:
            self.office.await_(lambda: [r for r, one in self.letters.items() if one not in self.office.letters])
            found = {peer: self.office.letters.pop(one) for peer, one in self.letters.items()}
        for peer, parts in found.items():
            self._check(peer, parts)
        found[self.rank] = self.mine
        senders = [found[peer] for peer in self.group if peer in found]
        return tuple(torch.cat(pieces) for pieces in zip(*senders, strict=True))

    def _check(self, peer: int, parts: tuple[Tensor, ...]) -> None:
        rows = (self.message.arriving or ())[self.group.index(peer)]
        awaited = [((rows, *p.shape[1:]), p.dtype) for p in self.message.parts]
        sent = [(tuple(p.shape), p.dtype) for p in parts]
        if sent != awaited:
            raise WireMismatch(f"rank {peer} sends {sent} to rank {self.rank}, which expects {awaited}")


class LocalChannel(Channel):
    """The channel of one rank among ranks in one process; `LocalChannel.world` makes all of them."""

    def __init__(self, rank: int, levels: ProcessGroups, office: _Office) -> None:
        self.rank, self.levels, self.meter = rank, levels, Meter(rank)
        self._office = office
        self._turns: Counter[tuple[object, ...]] = Counter()

    @staticmethod
    def world(ranks: int, levels: ProcessGroups | None = None, *, patience_s: float = 0.0) -> list[LocalChannel]:
        """Return one channel per rank, connected with each other.

        patience_s: seconds that ranks wait for each other's messages, if they are threads; 0: all ranks must send
        before one waits.
        """
        office = _Office(patience_s)
        levels = levels or ProcessGroups.flat(ranks)
        return [LocalChannel(rank, levels, office) for rank in range(ranks)]

    def start(self, message: Message) -> Pending:
        group = self.levels.group(message.level, self.rank)
        self.meter.count(message, group)
        with self._office.news:
            pending = self._post(message, group) if message.splits is None else self._write(message, group)
            self._office.news.notify_all()
        return pending

    def _post(self, message: Message, group: tuple[int, ...]) -> Pending:
        at = (group, message.level, self._turn(group, message.level))
        post = self._office.posts.setdefault(at, _Post())
        post.messages[self.rank] = message
        if len(post.messages) == len(group):
            del self._office.posts[at]  # complete: only its waiters need it now
        return _Deposited(self._office, post, group, self.rank)

    def _write(self, message: Message, group: tuple[int, ...]) -> Pending:
        pieces = zip(*(torch.split(p, list(message.splits or ())) for p in message.parts), strict=True)
        letters: dict[int, _Letter] = {}
        mine = tuple(p[:0] for p in message.parts)
        for peer, parts, rows in zip(group, pieces, message.arriving or (), strict=True):
            copies = tuple(p.clone() for p in parts)
            if peer == self.rank:
                mine = copies
                continue
            if parts[0].shape[0]:
                sent = self._turn(message.level, "to", peer)
                self._office.letters[message.level, self.rank, peer, sent] = copies
            if rows:
                letters[peer] = (message.level, peer, self.rank, self._turn(message.level, "from", peer))
        return _Awaited(self._office, message, letters, group, self.rank, mine)

    def _turn(self, *what: object) -> int:
        self._turns[what] += 1
        return self._turns[what] - 1

    def close(self) -> None:
        self._office.posts.clear()
        self._office.letters.clear()


def combine(messages: dict[int, Message], group: Sequence[int]) -> dict[int, tuple[Tensor, ...]]:
    """Return the reply to every rank of `group`; raises WireMismatch when shapes, dtypes or collectives differ."""
    first = messages[group[0]]
    for rank in group[1:]:
        other = messages[rank]
        if _signature(other) != _signature(first):
            raise WireMismatch(
                f"the collectives of two ranks differ: rank {rank} sent {_signature(other)}, "
                f"rank {group[0]} sent {_signature(first)}"
            )
    columns = [[messages[r].parts[i] for r in group] for i in range(len(first.parts))]
    if first.combine is Collective.SHUFFLE:
        return {r: tuple(torch.stack([part[me] for part in c]) for c in columns) for me, r in enumerate(group)}
    shared = tuple(_reduce(column, first.combine) for column in columns)
    return {r: tuple(t.clone() for t in shared) for r in group}


def _reduce(column: list[Tensor], how: Collective) -> Tensor:
    if how is Collective.GATHER:
        return torch.stack(column)
    total = column[0].clone()
    for part in column[1:]:
        total = _both(total, part, how)
    return total


def _both(a: Tensor, b: Tensor, how: Collective) -> Tensor:
    if how is Collective.SUM:
        return a + b
    return torch.maximum(a, b) if how is Collective.MAX else a | b


def _signature(message: Message) -> tuple[object, ...]:
    return (message.combine.value, *((tuple(p.shape), str(p.dtype)) for p in message.parts))


def run_lockstep(channels: Sequence[Channel], methods: Sequence[Rounds]) -> list[Outcome]:
    """Run one exchange per rank to its end, in turns, and return the outcomes in rank order.

    Raises WireMismatch where ranks have different numbers of rounds.
    """
    outcomes: dict[int, Outcome] = {}
    wanted: dict[int, Message] = {}
    for rank, method in enumerate(methods):
        _advance(rank, method, None, wanted, outcomes)
    while wanted:
        if len(wanted) != len(methods):
            raise WireMismatch(
                f"ranks {sorted(outcomes)} have ended the exchange while ranks {sorted(wanted)} have more messages "
                "to send"
            )
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
