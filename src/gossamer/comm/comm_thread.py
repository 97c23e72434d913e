"""Run all collectives of a rank on one communication thread, in an order fixed before the step.

A plan may give the order of the turns (`plan.exchange.send_order` computes one that starts first what is ready first).
Otherwise the thread sends messages in the order of the key (job + L x round, round) with L the look-ahead; the end of a
job counts as its last round. Either order is fixed before the step and equal on all ranks, in whatever order jobs
arrive. "Resume the oldest job" is not: with jobs arriving from hooks it paired wrong messages without any error.

Point-to-point steps (`P2PStep`) are different: their jobs may wait for each other's results, as in a pipeline. Their
messages only start in a fixed order and no job waits in that order, so a schedule without deadlock has none here.
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
from gossamer.spec.plan import LOOK_AHEAD


def order(rounds: Sequence[int], look_ahead: int) -> list[tuple[int, int]]:
    """Return (job, round) pairs in sending order; round == rounds[job] receives the last reply."""
    keys = [(job + look_ahead * r, r, job) for job, n in enumerate(rounds) for r in range(n + 1)]
    return [(job, r) for _, r, job in sorted(keys)]


def order_of_turns(rounds: Sequence[int], turns: Sequence[int]) -> list[tuple[int, int]] | None:
    """Return (job, round) pairs in the order of `turns`, the job of each; None if these are not the turns of `rounds`.

    An order is made for the exchanges of a plan. Steps with others, as inside an island, have turns of their own.
    """
    taken, found = [0] * len(rounds), list[tuple[int, int]]()
    if len(turns) != sum(rounds) + len(rounds):
        return None
    for job in turns:
        if not 0 <= job < len(rounds) or taken[job] > rounds[job]:
            return None
        found.append((job, taken[job]))
        taken[job] += 1
    return found


def needed(rounds: Sequence[int], ordered: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Return for each job how many of the first jobs must have arrived for it to end.

    These are the jobs up to the highest one that has a turn before the end of that job. `ordered`: (job, round) pairs.
    """
    found, there = [0] * len(rounds), 0
    for job, r in ordered:
        there = max(there, job + 1)
        if r == rounds[job]:
            found[job] = there
    return tuple(found)


Observer = Callable[[str, int], None]
S = TypeVar("S", bound="CommStep")


class _Dropped(Exception):
    """The step was given up by the rank itself."""


class CommStep:
    """A step of jobs whose messages share one order. Job i sends rounds[i] messages.

    Jobs must not wait for each other: work that depends on a job's result belongs in a later step. The communication
    thread runs steps in the order in which they were begun.
    """

    def __init__(self, rounds: Sequence[int], turns: Sequence[int] = ()) -> None:
        self.rounds, self._turns = tuple(rounds), tuple(turns)
        self.needed: tuple[int, ...] = ()  # by job: how many of the first must have arrived for it to end
        self.arrivals: queue.SimpleQueue[tuple[int, Rounds] | None] = queue.SimpleQueue()
        self.futures: list[Future[Outcome]] = [Future() for _ in rounds]

    def submit(self, job: int, method: Rounds) -> None:
        """Give job `job` its method, from any thread; its first message is sent at the job's turn."""
        self.arrivals.put((job, method))

    def result(self, job: int) -> Outcome:
        """Wait for the end of a job and return its outcome.

        Raises the error that ended the step (PeerLost, WireMismatch, an error of a method).
        """
        return self.futures[job].result()

    def has_ended(self, job: int) -> bool:
        """Return whether a job has ended. Raises as `result` does."""
        return self.futures[job].done() and bool(self.futures[job].result())

    def drop(self) -> None:
        """Abandon the step: running methods are closed, no state has changed. Peers find this rank missing."""
        self.arrivals.put(None)

    def order(self, look_ahead: int) -> list[tuple[int, int]]:
        """Return the (job, round) turns of this step: in the order given, if it is one for these jobs."""
        given = order_of_turns(self.rounds, self._turns) if self._turns else None
        return order(self.rounds, look_ahead) if given is None else given

    def padding_message(self, job: int) -> Message:
        """Return the message to send for a job that has nothing more to send."""
        return _EMPTY

    def on_started(self, job: int, one: _Job) -> bool:
        """Take note that the message of job `job` has just been started.

        Returns whether the step, instead of the communication thread, waits for the reply.
        """
        return False

    @property
    def is_done(self) -> bool:
        """Whether the communication thread has finished this step."""
        return all(f.done() for f in self.futures)

    def fail(self, error: BaseException) -> None:
        """Raise `error` in every thread that waits for a result of this step, or will."""
        for future in self.futures:
            if not future.done():
                future.set_exception(error)


class P2PStep(CommStep):
    """The point-to-point messages of one training step; sending a message may need the data of another.

    Messages start in the order of the jobs. This order is the rank's own; only for two ranks and one direction must it
    be the same on both. The thread that asks for a result waits for its message and decodes it. A second thread waits
    for messages that bring no data, so that their buffers are freed. Ask for every result, of sends too: it raises if
    the send failed.
    """

    def __init__(self, jobs: int) -> None:
        super().__init__([1] * jobs)
        self.started: list[Future[_Job]] = [Future() for _ in range(jobs)]

    def result(self, job: int) -> Outcome:
        return self.started[job].result().finish()

    def finish(self) -> None:
        """Wait for all jobs; raises the error of the first job that failed."""
        for job in range(len(self.rounds)):
            self.result(job)

    def order(self, look_ahead: int) -> list[tuple[int, int]]:
        return [(job, 0) for job in range(len(self.rounds))]

    def padding_message(self, job: int) -> Message:
        raise WireMismatch(f"point-to-point transfer {job} has no message to send: internal error, please report")

    def on_started(self, job: int, one: _Job) -> bool:
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
            raise WireMismatch(
                "a point-to-point transfer declared one message and has another to send: internal error, please report"
            )


class CommThread:
    """A thread that runs the exchanges of one rank over one channel. After a lost peer, make a new one."""

    def __init__(self, channel: Channel, *, look_ahead: int = LOOK_AHEAD, observe: Observer | None = None) -> None:
        """Start the thread. `observe` is called for every message as it is sent.

        Its arguments are a text (collective, bytes, job, round) and the number of the message, counted from 1.
        """
        self.channel = channel
        self._observe = observe
        self._sent = 0
        self.busy_s = 0.0  # time spent waiting for messages in flight, of all steps
        self.encoded_s = 0.0  # CPU time of this thread spent encoding and decoding, of all steps
        self._look_ahead = look_ahead
        self._steps: queue.SimpleQueue[CommStep | None] = queue.SimpleQueue()
        self._unfinished: list[CommStep] = []
        self._aside = ThreadPoolExecutor(1, "gossamer-sent")  # its thread starts with the first transfer
        self._thread = threading.Thread(target=self._work, name="gossamer-pump", daemon=True)
        self._thread.start()

    def begin(self, rounds: Sequence[int], turns: Sequence[int] = ()) -> CommStep:
        """Open a step with one job per entry of `rounds`, the number of messages of the job.

        `turns`: the job of each turn in order, used if every job has its number of turns there. All ranks must call it
        with the same arguments.
        """
        step = CommStep(rounds, turns)
        step.needed = needed(step.rounds, step.order(self._look_ahead))
        return self._begin(step)

    def transfers(self, jobs: int) -> P2PStep:
        """Open a step of `jobs` point-to-point messages, in this rank's order."""
        return self._begin(P2PStep(jobs))

    def _begin(self, step: S) -> S:
        self._unfinished = [s for s in self._unfinished if not s.is_done] + [step]
        self._steps.put(step)
        return step

    def close(self) -> None:
        """End the thread. It waits for messages in flight as long as the channel's timeout."""
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
                raise _Dropped("this rank aborted the communication of the step")
            jobs[arrived[0]] = _Job(arrived[1])
        one = jobs[job]
        began = time.perf_counter()
        reply = one.under_way.wait() if one.under_way else None
        if one.under_way:
            self.busy_s += time.perf_counter() - began
            one.under_way = None  # its buffers are freed as soon as the method has read them
        if one.outcome is None:
            began = time.thread_time()  # of this thread alone: others may compute on the same core
            one.advance(reply)
            self.encoded_s += time.thread_time() - began
        del reply  # before anyone is told of the result: a waiting thread goes on with its buffers freed
        if r == step.rounds[job]:
            if one.outcome is None:
                raise WireMismatch(f"exchange job {job} declared {r} messages and has another to send")
            del jobs[job]
            step.futures[job].set_result(one.outcome)
        else:
            message, one.wanted = one.wanted or step.padding_message(job), None
            self._sent += 1
            if self._observe is not None:
                self._observe(f"{message.combine.value} of {message.nbytes} bytes, job {job} round {r}", self._sent)
            one.under_way = self.channel.start(message)
            if step.on_started(job, one):
                del jobs[job]
                if not any(message.arriving or (1,)):
                    self._aside.submit(one.finish)


_EMPTY = Message((torch.empty(0, dtype=torch.uint8),), Collective.SUM)
