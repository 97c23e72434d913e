"""The pump: one communication thread, one order of messages, known before the step.

Messages go out in the order of the key (job + L x round, round) with L the look-ahead; the end of a job counts as
its last round. The order depends on the declared rounds alone, so it is the same on all ranks however jobs arrive.
"Resume whatever is oldest" is not: with jobs arriving from hooks it paired wrong messages without any error.

Transfers are the other kind of step: jobs that do wait for each other's results, as in a pipeline. Their messages only
start in a fixed order; nobody waits in that order, so what the action lists allow cannot lock up on the wire.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from gossamer.comm.channel import Channel, Pending
from gossamer.comm.message import Collective, Message, Outcome, Rounds
from gossamer.spec.errors import WireMismatch


def order(rounds: Sequence[int], look_ahead: int) -> list[tuple[int, int]]:
    """(job, round) in the order in which they go out; round == rounds[job] receives the last reply."""
    keys = [(job + look_ahead * r, r, job) for job, n in enumerate(rounds) for r in range(n + 1)]
    return [(job, r) for _, r, job in sorted(keys)]


def needed(rounds: Sequence[int], look_ahead: int) -> tuple[int, ...]:
    """By job: how many of the first jobs have had a turn before its end, and must be there for it to end."""
    found, there = [0] * len(rounds), 0
    for job, r in order(rounds, look_ahead):
        there = max(there, job + 1)
        if r == rounds[job]:
            found[job] = there
    return tuple(found)


Observer = Callable[[str, int], None]
S = TypeVar("S", bound="CommStep")


class _Dropped(Exception):
    """The step was given up by the rank itself."""


class CommStep:
    """Some jobs whose messages share one order. Job i sends rounds[i] messages; jobs must not wait for each other:
    what depends on a job's result belongs in a later step. Steps are worked off in the order they were begun.
    """

    def __init__(self, rounds: Sequence[int]) -> None:
        self.rounds = tuple(rounds)
        self.needed: tuple[int, ...] = ()  # by job: how many of the first must be there for it to end
        self.arrivals: queue.SimpleQueue[tuple[int, Rounds] | None] = queue.SimpleQueue()
        self.futures: list[Future[Outcome]] = [Future() for _ in rounds]

    def submit(self, job: int, method: Rounds) -> None:
        """Give job `job` its method, from any thread; its first message goes out when its turn comes."""
        self.arrivals.put((job, method))

    def result(self, job: int) -> Outcome:
        """Wait for the end of a job. Raises what ended the step (PeerLost, WireMismatch, an error of a method)."""
        return self.futures[job].result()

    def drop(self) -> None:
        """Give the step up: methods that run are closed, no state has moved. Peers will find this rank missing."""
        self.arrivals.put(None)

    def order(self, look_ahead: int) -> list[tuple[int, int]]:
        """The turns of the pump in this step."""
        return order(self.rounds, look_ahead)

    def filler(self, job: int) -> Message:
        """What goes out for a job that has nothing more to send."""
        return _EMPTY

    def takes_over(self, job: int, one: _Job) -> bool:
        """Told of a job whose message has just gone out: whether its reply is no affair of the pump."""
        return False

    @property
    def is_done(self) -> bool:
        """Whether the pump has no more to do with it."""
        return all(f.done() for f in self.futures)

    def fail(self, error: BaseException) -> None:
        """Tell everybody who waits, or will."""
        for future in self.futures:
            if not future.done():
                future.set_exception(error)


class P2PStep(CommStep):
    """A step of jobs of one message each, which may wait for each other's results. They go out in the order of the
    jobs; this order is the rank's own: only between two ranks, one direction, must both have the same. Whoever asks
    for a result waits for the message and has it decoded; messages that bring nothing are waited for on the side,
    so that what was sent is freed. Ask for every result, of what was sent too: it says whether it got away.
    """

    def __init__(self, jobs: int) -> None:
        super().__init__([1] * jobs)
        self.started: list[Future[_Job]] = [Future() for _ in range(jobs)]

    def result(self, job: int) -> Outcome:
        return self.started[job].result().finish()

    def finish(self) -> None:
        """Wait for all of them; raises what went wrong with the first that did not arrive."""
        for job in range(len(self.rounds)):
            self.result(job)

    def order(self, look_ahead: int) -> list[tuple[int, int]]:
        return [(job, 0) for job in range(len(self.rounds))]

    def filler(self, job: int) -> Message:
        raise WireMismatch(f"transfer {job} has no message to send")

    def takes_over(self, job: int, one: _Job) -> bool:
        self.started[job].set_result(one)
        return True

    @property
    def is_done(self) -> bool:
        return all(f.done() for f in self.started)

    def fail(self, error: BaseException) -> None:
        for future in self.started:
            if not future.done():
                future.set_exception(error)


@dataclass(slots=True)
class _Job:
    method: Rounds
    under_way: Pending | None = None
    outcome: Outcome | None = None
    wanted: Message | None = None
    error: BaseException | None = None
    busy: threading.Lock = field(default_factory=threading.Lock)

    def advance(self, reply: tuple[Tensor, ...] | None) -> None:
        try:
            self.wanted = next(self.method) if reply is None else self.method.send(reply)
        except StopIteration as end:
            self.outcome, self.wanted = end.value, None

    def finish(self) -> Outcome:
        """Wait for the only message and end the method, from whatever thread comes first."""
        with self.busy:
            if self.outcome is None and self.error is None:
                try:
                    self._end()
                except BaseException as error:
                    self.error = error
            if self.error is not None:
                raise self.error
            assert self.outcome is not None
            return self.outcome

    def _end(self) -> None:
        assert self.under_way is not None
        self.advance(self.under_way.wait())
        self.under_way = None
        if self.outcome is None:
            self.method.close()
            raise WireMismatch("a transfer declared one message and wants to send more")


class CommThread:
    """Runs the exchanges of one rank over one channel. After a lost peer it is of no more use: make a new one."""

    def __init__(self, channel: Channel, *, look_ahead: int = 4, observe: Observer | None = None) -> None:
        """`observe` is told of every message as it goes out: what it is, and its number in the order of all ranks."""
        self.channel = channel
        self._observe = observe
        self._sent = 0
        self.busy_s = 0.0  # time spent waiting for messages under way, of all steps
        self._look_ahead = look_ahead
        self._steps: queue.SimpleQueue[CommStep | None] = queue.SimpleQueue()
        self._unfinished: list[CommStep] = []
        self._aside = ThreadPoolExecutor(1, "gossamer-sent")  # its thread starts with the first transfer
        self._thread = threading.Thread(target=self._work, name="gossamer-pump", daemon=True)
        self._thread.start()

    def begin(self, rounds: Sequence[int]) -> CommStep:
        """Open a step with one job per entry, each sending that many messages. The same on all ranks."""
        step = CommStep(rounds)
        step.needed = needed(step.rounds, self._look_ahead)
        return self._begin(step)

    def transfers(self, jobs: int) -> P2PStep:
        """Open a step of so many transfers, in this rank's order."""
        return self._begin(P2PStep(jobs))

    def _begin(self, step: S) -> S:
        self._unfinished = [s for s in self._unfinished if not s.is_done] + [step]
        self._steps.put(step)
        return step

    def close(self) -> None:
        """End the thread. What is under way is waited for as long as the channel's timeout."""
        for step in self._unfinished:
            step.drop()
        self._steps.put(None)
        self._thread.join()
        self._aside.shutdown(cancel_futures=True)

    def _work(self) -> None:
        while (step := self._steps.get()) is not None:
            jobs: dict[int, _Job] = {}
            try:
                for job, r in step.order(self._look_ahead):
                    self._turn(step, jobs, job, r)
            except BaseException as error:  # every waiter must learn of it, whatever it is
                step.fail(error)
            finally:
                for one in jobs.values():
                    one.method.close()

    def _turn(self, step: CommStep, jobs: dict[int, _Job], job: int, r: int) -> None:
        while job not in jobs:
            arrived = step.arrivals.get()
            if arrived is None:
                raise _Dropped("this rank gave the step up")
            jobs[arrived[0]] = _Job(arrived[1])
        one = jobs[job]
        began = time.perf_counter()
        reply = one.under_way.wait() if one.under_way else None
        if one.under_way:
            self.busy_s += time.perf_counter() - began
            one.under_way = None  # its buffers go as soon as the method has read them
        if one.outcome is None:
            one.advance(reply)
        if r == step.rounds[job]:
            if one.outcome is None:
                raise WireMismatch(f"job {job} declared {r} messages and wants to send more")
            step.futures[job].set_result(one.outcome)
        else:
            message, one.wanted = one.wanted or step.filler(job), None
            self._sent += 1
            if self._observe is not None:
                self._observe(f"{message.combine.value} of {message.nbytes} bytes, job {job} round {r}", self._sent)
            one.under_way = self.channel.start(message)
            if step.takes_over(job, one):
                del jobs[job]
                if not any(message.arriving or (1,)):
                    self._aside.submit(one.finish)


_EMPTY = Message((torch.empty(0, dtype=torch.uint8),), Collective.SUM)
