"""Ranks that keep in touch while one of them works: nobody's wait is longer than a piece of its work."""

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
    """What the rank that works says of itself."""

    WORKING = 0
    DONE = 1
    FAILED = 2


@dataclass(frozen=True, slots=True)
class Keepalive:
    """All ranks of the run, of which `speaker` has the whole model. No pump step may be under way."""

    channel: Channel
    speaker: int
    asked_to_stop: Callable[[], bool]

    @property
    def speaks(self) -> bool:
        """Whether this rank is the one that works."""
        return self.channel.rank == self.speaker

    def pulse(self, word: KeepaliveMessage = KeepaliveMessage.WORKING) -> KeepaliveMessage:
        """All ranks call it as often; what the speaker says. Raises Interrupted where any rank was asked to stop."""
        rows = gathered(self.channel, [float(word), float(self.asked_to_stop())])
        if bool(rows[:, 1].any()):
            raise Interrupted("stopped as asked in the proof, before the first step: nothing was trained")
        return KeepaliveMessage(int(rows[self.speaker, 0]))

    def wait(self) -> bool:
        """Until the speaker has done; whether it went well."""
        while (word := self.pulse()) is KeepaliveMessage.WORKING:
            pass
        return word is KeepaliveMessage.DONE

    def text(self, said: str = "") -> str:
        """The speaker's."""
        return self.texts(said)[self.speaker]

    def texts(self, mine: str) -> list[str]:
        """Everybody's, however long."""
        said = mine.encode()
        longest = int(gathered(self.channel, [float(len(said))]).max())
        row = torch.zeros(longest, dtype=torch.uint8)
        row[: len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8) if said else row[:0]
        (rows,) = self.channel.start(Message((row,), Collective.GATHER, self.channel.levels.whole)).wait()
        return [bytes(one.tolist()).rstrip(b"\0").decode() for one in rows]

    def rows(self, mine: Tensor) -> Tensor:
        """Everybody's, (ranks, n) float64, of (n,)."""
        return gathered(self.channel, mine.tolist())

    def most(self, value: float) -> tuple[int, float]:
        """The rank that has most, the first of them, and how much."""
        found = gathered(self.channel, [value])[:, 0]
        rank = int(torch.argmax(found))
        return rank, float(found[rank])
