"""Channels: the transports that carry messages. The same method runs over each of them.

`ProcessGroupChannel` uses torch's process groups (the real run). `LocalChannel` joins several ranks in one process (the
reference). `CountingChannel` sends nothing and only counts (planning). `LoopbackChannel` answers itself (timing). Each
one meters the bytes it sends, per link.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.comm.message import Message, Outcome, ProcessGroups, Rounds
from gossamer.comm.meter import Meter
from gossamer.comm.row_gather import gather_rows

UNDER_WAY = 8  # messages at a time, at most, that a schedule has on its way: each takes a thread and buffers


class Pending(ABC):
    """A message in flight."""

    @abstractmethod
    def wait(self) -> tuple[Tensor, ...]:
        """Block until the message is combined and return the parts, as `Collective` describes them.

        Raises PeerLost or WireMismatch.
        """


class Channel(ABC):
    """The transport of one rank.

    All ranks of a group must start its messages in the same order. Uneven all-to-alls need the same order only on both
    sides of every pair of ranks that have rows for each other.
    """

    rank: int
    levels: ProcessGroups
    meter: Meter

    def widen(self, levels: ProcessGroups) -> None:
        """Add process groups to the channel. All ranks must call it between the same two messages."""
        self.levels = self.levels.and_more(levels)

    @abstractmethod
    def start(self, message: Message) -> Pending:
        """Start sending a message and count its bytes."""

    @abstractmethod
    def close(self) -> None:
        """Free the channel's resources. Starting a message on a closed channel is an error."""


def gathered(channel: Channel, row: Sequence[float]) -> Tensor:
    """All-gather `row` over all ranks; return (ranks, len(row)) float64. No rank returns before all have called.

    All ranks call it, while no step of the communication thread is in flight.
    """
    mine = torch.tensor(row, dtype=torch.float64)
    return carry(channel, gather_rows(mine, channel.levels, channel.levels.whole, channel.rank)).mean


def carry(channel: Channel, method: Rounds) -> Outcome:
    """Run one exchange to its end in this thread, for callers that need its outcome before anything else."""
    try:
        message = next(method)
        while True:
            message = method.send(channel.start(message).wait())
    except StopIteration as end:
        outcome: Outcome = end.value
        return outcome
