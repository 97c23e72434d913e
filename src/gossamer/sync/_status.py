"""What ranks tell each other while their islands are apart: small facts beside the steps, for which nobody waits.

After every second step a rank says whether it was asked to stop, and how its island's steps since then went. What all
have said is heard two steps later: a request takes effect on all ranks after the same step, two or three after it was
made, and an island can be ahead of another one by fewer than four.
Wire: 32 bytes from every rank to all, every other step, over a group of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from gossamer.comm.channel import Channel, Pending
from gossamer.comm.message import AHEAD, WORD, Collective, Message, ProcessGroups, Traffic


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """What all ranks know of the islands' steps up to one, since the one they heard of before; by island."""

    step: int
    ask: int  # the largest request
    losses: tuple[float, ...]  # sums over the valid labels
    weights: tuple[float, ...]  # valid labels
    rejected: tuple[int, ...]  # steps that moved nothing
    late: tuple[bool, ...]  # whether the round that has ended went on without it


class StatusChannel(ABC):
    """How ranks of islands that are apart keep in touch."""

    @abstractmethod
    def note(self, loss: float, weight: float, *, committed: bool) -> None:
        """A step of this island: its mean loss over so many valid labels."""

    @abstractmethod
    def after(self, done: int, ask: int, *, last: bool = False) -> list[ReplicaStatus]:
        """What is heard after `done` steps, the same on all ranks; `ask`: a request of this one, `last`: nothing comes
        after it.
        """


@dataclass(slots=True)
class StatusExchange(StatusChannel):
    """One rank's end. `start`: the steps that all ranks made together, before the islands parted."""

    every: ClassVar[int] = AHEAD // 2
    traffic: ClassVar[Traffic] = Traffic(Collective.GATHER, 4, 8)  # of one word

    channel: Channel
    start: int = 0
    _said: Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.float64))
    _under_way: tuple[int, Pending] | None = None

    @staticmethod
    def of(channel: Channel, start: int) -> StatusExchange | None:
        """None where there is but one island: all ranks vote at every step."""
        return StatusExchange(channel, start) if len(channel.levels.groups["island"]) > 1 else None

    def note(self, loss: float, weight: float, *, committed: bool) -> None:
        self._said += sums_of(loss, weight, committed=committed)

    def after(self, done: int, ask: int, *, last: bool = False) -> list[ReplicaStatus]:
        """After `done` steps: hear, where it is time, and speak, unless a stop was heard. The same on all ranks.

        `last`: nothing comes after it, so all that is left is told and heard.
        """
        if not last and (done - self.start) % self.every:
            return []
        heard = self._hear()
        if not any(one.ask for one in heard):
            self._tell(done, ask)
            heard += self._hear() if last else []
        return heard

    def _tell(self, done: int, ask: int) -> None:
        row = torch.cat((torch.tensor([float(ask)], dtype=torch.float64), self._said))
        self._said = torch.zeros_like(self._said)
        self._under_way = done, self.channel.start(Message((row,), Collective.GATHER, WORD))

    def _hear(self) -> list[ReplicaStatus]:
        if self._under_way is None:
            return []
        (step, pending), self._under_way = self._under_way, None
        (rows,) = pending.wait()  # (ranks, 4)
        return [news_of(step, rows, self.channel.levels)]


def sums_of(loss: float, weight: float, *, committed: bool) -> Tensor:
    """What a step adds to what its island tells, (3,) float64: loss over the valid labels, these, rejected steps."""
    return torch.tensor([loss * weight, weight, 0.0] if committed else [0.0, 0.0, 1.0], dtype=torch.float64)


def news_of(step: int, rows: Tensor, levels: ProcessGroups, late: tuple[bool, ...] = ()) -> ReplicaStatus:
    """What `rows`, (ranks, 4) float64, say: a request, and the sums of an island, each rank's its island's own."""
    firsts = [levels.everyone.index(island[0]) for island in levels.groups["island"]]
    losses, weights, rejected = rows[firsts, 1:].unbind(1)
    return ReplicaStatus(
        step=step,
        ask=int(rows[:, 0].max()),
        losses=tuple(losses.tolist()),
        weights=tuple(weights.tolist()),
        rejected=tuple(int(n) for n in rejected.tolist()),
        late=late or (False,) * len(firsts),
    )
