"""Channels: what carries a message. The same method runs over each of them.

`ProcessGroupChannel` is a process group (truth), `LocalChannel` is several ranks in one process without threads
(meaning), `CountingChannel` carries nothing and only counts (planning). Each one meters the bytes it sends, per link.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.comm.message import Collective, Message, Outcome, ProcessGroups, Rounds
from gossamer.comm.meter import Meter


class Pending(ABC):
    """A message under way."""

    @abstractmethod
    def wait(self) -> tuple[Tensor, ...]:
        """Block until it has been combined; the parts, as `Collective` says. Raises PeerLost or WireMismatch."""


class Channel(ABC):
    """One rank's end of the wire. Messages of a group must be started in the same order on all its ranks; those of
    uneven shuffles in the same order on both sides of every pair of ranks that have something for each other.
    """

    rank: int
    levels: ProcessGroups
    meter: Meter

    def widen(self, levels: ProcessGroups) -> None:
        """Learn of more levels; all ranks do so between the same two messages."""
        self.levels = self.levels.and_more(levels)

    @abstractmethod
    def start(self, message: Message) -> Pending:
        """Hand a message over; it is counted when it is started."""

    @abstractmethod
    def close(self) -> None:
        """Free what it holds. Starting a message on a closed channel is an error."""


def gathered(channel: Channel, row: Sequence[float]) -> Tensor:
    """Everybody's `row`, (ranks, len(row)) float64, while no pump step is under way; all ranks call it."""
    mine = torch.tensor(row, dtype=torch.float64)
    (rows,) = channel.start(Message((mine,), Collective.GATHER, channel.levels.whole)).wait()
    return rows


def carry(channel: Channel, method: Rounds) -> Outcome:
    """Run one job to its end, here and now: for whoever needs the result before anything else can go on."""
    try:
        message = next(method)
        while True:
            message = method.send(channel.start(message).wait())
    except StopIteration as end:
        outcome: Outcome = end.value
        return outcome
