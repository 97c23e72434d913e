"""Status messages between islands in local-update training: stop requests and losses, sent beside the steps.

After every second step a rank sends whether it was asked to stop, and the sums of its island's steps since then. All
receive them two steps later. So a request takes effect on all ranks after the same step, two or three after it was
made. No island gets more than three steps ahead of another one.

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
    """The status of all islands up to `step`, since the status before it: equal on all ranks, sums by island."""

    step: int
    ask: int  # the largest request
    losses: tuple[float, ...]  # sums over the valid labels
    weights: tuple[float, ...]  # valid labels
    rejected: tuple[int, ...]  # steps that moved nothing
    late: tuple[bool, ...]  # whether the round that has ended went on without it


class StatusChannel(ABC):
    """A channel for status messages between islands in local-update training."""

    @abstractmethod
    def note(self, loss: float, weight: float, *, committed: bool) -> None:
        """Add a step of this island to the next status message: its mean loss over `weight` valid labels."""

    @abstractmethod
    def after(self, done: int, ask: int, *, last: bool = False) -> list[ReplicaStatus]:
        """Return the status messages that arrive after `done` steps, the same on all ranks.

        `ask`: this rank's request; `last`: no step follows.
        """


@dataclass(slots=True)
class StatusExchange(StatusChannel):
    """The status channel of one rank, with a gather every second step. `start`: synchronous warm-up steps."""

    every: ClassVar[int] = AHEAD // 2
    traffic: ClassVar[Traffic] = Traffic(Collective.GATHER, 4, 8)  # of one word

    channel: Channel
    start: int = 0
    _said: Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.float64))
    _under_way: tuple[int, Pending] | None = None

    @staticmethod
    def of(channel: Channel, start: int) -> StatusExchange | None:
        """Build the channel; None with a single island, whose ranks vote at every step."""
        return StatusExchange(channel, start) if channel.levels.has_several("island") else None

    def note(self, loss: float, weight: float, *, committed: bool) -> None:
        self._said += sums_of(loss, weight, committed=committed)

    def after(self, done: int, ask: int, *, last: bool = False) -> list[ReplicaStatus]:
        """Receive the previous status where one is due after `done` steps, and send the next one.

        It sends none after a request has arrived. Return the same on all ranks. `last`: no step follows, so wait for
        this status too.
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
    """Return a step's part of the status sums, (3,) float64: loss over valid labels, their number, rejected steps."""
    return torch.tensor([loss * weight, weight, 0.0] if committed else [0.0, 0.0, 1.0], dtype=torch.float64)


def news_of(step: int, rows: Tensor, levels: ProcessGroups, late: tuple[bool, ...] = ()) -> ReplicaStatus:
    """Return the status in `rows`, (ranks, 4) float64: each rank's request and the sums of its island."""
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
