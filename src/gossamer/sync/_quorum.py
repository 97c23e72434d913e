"""Who takes part in a round, where nobody is waited for any longer than so: a thread answers for a rank that is busy.

At the end of a round all ranks are asked, again and again, whether they are there. When half of the islands have been
waiting for `patience_s`, the round goes on without the others. All know of it, as all have heard the same answers; an
island that comes later finds what was decided in its absence, in order, and has nothing to do but to follow it.
Wire: 16 bytes from every rank to all for each time they are asked, which is whenever a rank that is not there has
waited `pause_s` or has come; then once, with what it says of the round, the 32 bytes of a word.
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

_AWAY, _FULL = -1.0, -math.inf  # what a rank says that is not there; that has no room for one more round
_MOST = 8  # rounds that may go on without an island before it has followed: each keeps what has come of it


@dataclass(frozen=True, slots=True)
class RoundDeadline:
    """A round's end: after which step of the run, how many numbers a rank says of it, whether all are waited for."""

    step: int
    width: int
    waits: bool


@dataclass(frozen=True, slots=True)
class RoundQuorum:
    """What has come of one. `present`: by rank, whole islands; `rows`: (ranks, width) float64, zeros of the absent."""

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
    """One rank's end. `asked`: whether this rank was asked to stop. What a rank brings to a round is handed to `depart`
    on its thread, while it waits; for a rank that is absent it is called with None, while that computes.
    """

    channel: Channel
    patience_s: float
    asked: Callable[[], bool]
    pause_s: float = 0.05
    missed: int = 0  # the last step after which a round went on without this rank
    _said: Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.float64))
    _answers: dict[int, _Answer[Brought]] = field(default_factory=dict)
    _ended: dict[int, tuple[RoundQuorum, Left]] = field(default_factory=dict)
    _heard: list[ReplicaStatus] = field(default_factory=list)
    _error: BaseException | None = None
    _ending: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _thread: threading.Thread | None = None

    def begin(self, dues: Iterable[RoundDeadline], depart: Callable[[RoundQuorum, Brought | None], Left]) -> None:
        """From now on a thread sees to it that these take place, in their order: the same on all ranks."""
        self._thread = threading.Thread(target=self._work, args=(dues, depart), name="gossamer-roll", daemon=True)
        self._thread.start()

    def answer(self, step: int, row: tuple[float, ...], brought: Brought) -> tuple[RoundQuorum, Left]:
        """This rank is there for the round that ends after `step`: wait until the others are, or have been waited for.
        What came of it, and what `depart` made of that. Raises what ended the thread.
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
        """What was said with the rounds that have ended for this rank since it last asked."""
        heard, self._heard = self._heard, []
        return heard

    def close(self) -> None:
        """End the thread, on all ranks: who still waits for a round is told so."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _work(self, dues: Iterable[RoundDeadline], depart: Callable[[RoundQuorum, Brought | None], Left]) -> None:
        error: BaseException = PeerLost("the run has ended on another rank")
        try:
            for due in dues:
                if (call := self._called(due)) is None:
                    break
                is_present = call.present[self.channel.rank]
                left = depart(call, self._answers[due.step].brought if is_present else None)
                with self._changed:
                    self._ended[due.step] = call, left
                    self.missed = self.missed if is_present else due.step
                    self._changed.notify_all()
                if call.news.ask:
                    break
        except BaseException as found:  # whoever waits must learn of it, whatever it is
            error = found
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _called(self, due: RoundDeadline) -> RoundQuorum | None:
        """Ask until it is decided. None: somebody has ended the run."""
        levels, rank = self.channel.levels, self.channel.rank
        while True:
            with self._changed:
                self._changed.wait_for(lambda: due.step in self._answers or self._ending, self.pause_s)
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
    """Whether at least half of the islands are there for so long, and the others have room for what they miss."""
    return _FULL not in waited_s and sorted(waited_s, reverse=True)[math.ceil(len(waited_s) / 2) - 1] >= patience_s
