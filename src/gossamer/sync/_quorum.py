"""The quorum of a sync round, which continues without stragglers after `patience_s`; a thread answers for a busy rank.

At the end of a round all ranks gather, again and again, whether they are present. When half of the islands have waited
for `patience_s`, the round continues without the others. All ranks decide alike, as all have the same answers. A late
island finds the results of the rounds it missed, in order, and applies them.

Wire: 16 bytes from every rank to all for each gather, which runs when a rank arrives, and else after `_PAUSE_S`; then
one more, with a rank's row of the round and the 32 bytes of a status message.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor

from gossamer.comm.channel import Channel
from gossamer.comm.message import WORD, Collective, Message
from gossamer.spec.errors import PeerLost
from gossamer.sync._status import ReplicaStatus, StatusChannel, news_of, sums_of

Brought = TypeVar("Brought")
Left = TypeVar("Left")

_AWAY, _FULL = -1.0, -math.inf  # sent by an absent rank; by one whose backlog of rounds is full
_PAUSE_S = 0.05  # between two gathers in which no rank has arrived
_MOST = 8  # rounds an island may miss before the others wait for it: each holds its result in memory


@dataclass(frozen=True, slots=True)
class RoundDeadline:
    """The end of a sync round: the training step it follows, the width of a rank's row, whether it waits for all."""

    step: int
    width: int
    waits: bool


@dataclass(frozen=True, slots=True)
class RoundQuorum:
    """The outcome of gathering a quorum for one round, equal on all ranks.

    `present`: by rank, the same for all ranks of an island; `rows`: (ranks, width) float64, zeros for absent ranks.
    """

    step: int
    present: tuple[bool, ...]
    rows: Tensor
    news: ReplicaStatus


@dataclass(frozen=True, slots=True)
class _Answer(Generic[Brought]):
    row: tuple[float, ...]
    brought: Brought
    since_s: float


@dataclass(slots=True)
class QuorumThread(StatusChannel, Generic[Brought, Left]):
    """The thread of one rank that forms the quorum of each round and starts its exchange.

    `asked`: returns this rank's request to stop, 0 for none. The thread calls `contribute` with a rank's contribution
    to a round while the rank waits; for an absent rank it calls `contribute` with None while that computes.
    """

    channel: Channel
    patience_s: float
    asked: Callable[[], int]
    missed: int = 0  # the last step after which a round went on without this rank
    _said: Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.float64))
    _answers: dict[int, _Answer[Brought]] = field(default_factory=dict)
    _ended: dict[int, tuple[RoundQuorum, Left]] = field(default_factory=dict)
    _heard: list[ReplicaStatus] = field(default_factory=list)
    _error: BaseException | None = None
    _ending: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _thread: threading.Thread | None = None

    def begin(self, dues: Iterable[RoundDeadline], contribute: Callable[[RoundQuorum, Brought | None], Left]) -> None:
        """Start the thread, which runs the rounds `dues` in order; they must be the same on all ranks."""
        self._thread = threading.Thread(target=self._work, args=(dues, contribute), name="gossamer-roll", daemon=True)
        self._thread.start()

    def answer(self, step: int, row: tuple[float, ...], brought: Brought) -> tuple[RoundQuorum, Left]:
        """Report this rank present for the round that ends after `step`, and wait until its quorum is formed.

        Return the quorum and what `contribute` returned for it. Raise the error that ended the thread.
        """
        with self._changed:
            self._answers[step] = _Answer(row, brought, time.monotonic())
            self._changed.notify_all()
            self._changed.wait_for(lambda: step in self._ended or self._error is not None)
            if step not in self._ended:
                assert self._error is not None
                raise self._error
            del self._answers[step]
            call, left = self._ended.pop(step)
            if call.present[self.channel.rank]:
                self._said = torch.zeros_like(self._said)
            self._heard.append(call.news)
            return call, left

    def note(self, loss: float, weight: float, *, committed: bool) -> None:
        self._said += sums_of(loss, weight, committed=committed)

    def after(self, done: int, ask: int, *, last: bool = False) -> list[ReplicaStatus]:
        """Return the status messages of the rounds that have ended for this rank since the last call."""
        heard, self._heard = self._heard, []
        return heard

    def close(self) -> None:
        """End the thread on all ranks; a rank that waits for a round gets PeerLost."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _work(self, dues: Iterable[RoundDeadline], contribute: Callable[[RoundQuorum, Brought | None], Left]) -> None:
        error: BaseException = PeerLost("the run has ended on another rank")
        try:
            for due in dues:
                if (call := self._called(due)) is None:
                    break
                is_present = call.present[self.channel.rank]
                left = contribute(call, self._answers[due.step].brought if is_present else None)
                with self._changed:
                    self._ended[due.step] = call, left
                    self.missed = self.missed if is_present else due.step
                    self._changed.notify_all()
                if call.news.ask:
                    break
        except BaseException as found:  # re-raised in the thread that waits, whatever it is
            error = found
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _called(self, due: RoundDeadline) -> RoundQuorum | None:
        """Gather until the quorum is decided. Return None where a rank has ended the run."""
        levels, rank = self.channel.levels, self.channel.rank
        while True:
            with self._changed:
                self._changed.wait_for(lambda: due.step in self._answers or self._ending, _PAUSE_S)
                mine, ending = self._answers.get(due.step), self._ending
                behind = len(self._ended)
            absent = _AWAY if behind < _MOST else _FULL
            said = absent if mine is None else time.monotonic() - mine.since_s
            waited_s, ends = self._gathered((said, float(ending))).unbind(1)
            if bool(ends.any()):
                return None
            here = {island: float(waited_s[list(island)].min()) for island in levels.groups["island"]}
            if min(here.values()) >= 0 or (not due.waits and quorum_timed_out(list(here.values()), self.patience_s)):
                break
        present = tuple(here[levels.group("island", one)] >= 0 for one in levels.everyone)
        word = (float(self.asked()), *self._said.tolist()) if present[rank] else (float(self.asked()), 0.0, 0.0, 0.0)
        row = mine.row if mine is not None and present[rank] else (0.0,) * due.width
        rows = self._gathered((*word, *row))
        late = tuple(here[island] < 0 for island in levels.groups["island"])
        return RoundQuorum(due.step, present, rows[:, 4:], news_of(due.step, rows[:, :4], levels, late))

    def _gathered(self, row: tuple[float, ...]) -> Tensor:
        mine = torch.tensor(row, dtype=torch.float64)
        (rows,) = self.channel.start(Message((mine,), Collective.GATHER, WORD)).wait()
        return rows


def quorum_timed_out(waited_s: list[float], patience_s: float) -> bool:
    """Return whether at least half of the islands have waited `patience_s`, and no absent one has a full backlog."""
    return _FULL not in waited_s and sorted(waited_s, reverse=True)[math.ceil(len(waited_s) / 2) - 1] >= patience_s
