"""Keepalive messages while one rank works: every other rank waits at most for one unit of its work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from gossamer.comm.channel import Channel, gathered
from gossamer.comm.message import Collective, Message
from gossamer.spec.errors import Interrupted


class KeepaliveMessage(IntEnum):
    """The status message that the working rank sends to the waiting ranks."""

    WORKING = 0
    DONE = 1
    FAILED = 2


@dataclass(frozen=True, slots=True)
class Keepalive:
    """The ranks of a run, of which `speaker` runs the unsharded model while the others wait.

    No message of the communication thread may be in flight.
    """

    channel: Channel
    speaker: int
    asked_to_stop: Callable[[], bool]

    @property
    def speaks(self) -> bool:
        """Return whether this rank is the one that runs the unsharded model."""
        return self.channel.rank == self.speaker

    def pulse(self, word: KeepaliveMessage = KeepaliveMessage.WORKING) -> KeepaliveMessage:
        """Exchange one status message and return the speaker's. All ranks must call it equally often.

        `word`: this rank's message, of which only the speaker's counts. Raises Interrupted if any rank was asked to
        stop.
        """
        rows = gathered(self.channel, [float(word), float(self.asked_to_stop())])
        if bool(rows[:, 1].any()):
            raise Interrupted("stopped as asked in the proof, before the first step: nothing was trained")
        return KeepaliveMessage(int(rows[self.speaker, 0]))

    def wait(self) -> bool:
        """Wait until the speaker reports its end and return whether it succeeded."""
        while (word := self.pulse()) is KeepaliveMessage.WORKING:
            pass
        return word is KeepaliveMessage.DONE

    def text(self, said: str = "") -> str:
        """Return the speaker's text on every rank."""
        return self.texts(said)[self.speaker]

    def texts(self, mine: str) -> list[str]:
        """All-gather one text per rank, of any length, and return them by rank."""
        said = mine.encode()
        longest = int(gathered(self.channel, [float(len(said))]).max())
        row = torch.zeros(longest, dtype=torch.uint8)
        row[: len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8) if said else row[:0]
        (rows,) = self.channel.start(Message((row,), Collective.GATHER, self.channel.levels.whole)).wait()
        return [bytes(one.tolist()).rstrip(b"\0").decode() for one in rows]

    def rows(self, mine: Tensor) -> Tensor:
        """All-gather a vector `mine`, (n,), and return it as (ranks, n) float64."""
        return gathered(self.channel, mine.tolist())

    def most(self, value: float) -> tuple[int, float]:
        """Return the first rank with the largest value, and that value."""
        found = gathered(self.channel, [value])[:, 0]
        rank = int(torch.argmax(found))
        return rank, float(found[rank])
