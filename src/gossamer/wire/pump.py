"""The pump: one communication thread, one order of messages, known before the step.

Messages go out in the order of the key (job + L x round, round) with L the look-ahead; the end of a job counts as
its last round. The order depends on the declared rounds alone, so it is the same on all ranks however jobs arrive.
"Resume whatever is oldest" is not: with jobs arriving from hooks it paired wrong messages without any error.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.spec.errors import WireMismatch
from gossamer.wire.channel import Channel, Pending
from gossamer.wire.message import Combine, Message, Outcome, Rounds


def order(rounds: Sequence[int], look_ahead: int) -> list[tuple[int, int]]:
    """(job, round) in the order in which they go out; round == rounds[job] receives the last reply."""
    keys = [(job + look_ahead * r, r, job) for job, n in enumerate(rounds) for r in range(n + 1)]
    return [(job, r) for _, r, job in sorted(keys)]


Observer = Callable[[str, int], None]


class _Dropped(Exception):
    """The step was given up by the rank itself."""


class Step:
    """Some jobs whose messages share one order. Job i sends rounds[i] messages; jobs must not wait for each other:
    what depends on a job's result belongs in a later step. Steps are worked off in the order they were begun.
    """

    def __init__(self, rounds: Sequence[int]) -> None:
        self.rounds = tuple(rounds)
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


@dataclass(slots=True)
class _Job:
    method: Rounds
    under_way: Pending | None = None
    outcome: Outcome | None = None
    wanted: Message | None = None

    def advance(self, reply: tuple[Tensor, ...] | None) -> None:
        try:
            self.wanted = next(self.method) if reply is None else self.method.send(reply)
        except StopIteration as end:
            self.outcome, self.wanted = end.value, None


class Pump:
    """Runs the exchanges of one rank over one channel. After a lost peer it is of no more use: make a new one."""

    def __init__(self, channel: Channel, *, look_ahead: int = 4, observe: Observer | None = None) -> None:
        """`observe` is told of every message as it goes out: what it is, and its number in the order of all ranks."""
        self.channel = channel
        self._observe = observe
        self._sent = 0
        self.busy_s = 0.0  # time spent waiting for messages under way, of all steps
        self._look_ahead = look_ahead
        self._steps: queue.SimpleQueue[Step | None] = queue.SimpleQueue()
        self._unfinished: list[Step] = []
        self._thread = threading.Thread(target=self._work, name="gossamer-pump", daemon=True)
        self._thread.start()

    def begin(self, rounds: Sequence[int]) -> Step:
        """Open a step with one job per entry, each sending that many messages. The same on all ranks."""
        step = Step(rounds)
        self._unfinished = [s for s in self._unfinished if not all(f.done() for f in s.futures)] + [step]
        self._steps.put(step)
        return step

    def close(self) -> None:
        """End the thread. What is under way is waited for as long as the channel's timeout."""
        for step in self._unfinished:
            step.drop()
        self._steps.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (step := self._steps.get()) is not None:
            jobs: dict[int, _Job] = {}
            try:
                for job, r in order(step.rounds, self._look_ahead):
                    self._turn(step, jobs, job, r)
            except BaseException as error:  # every waiter must learn of it, whatever it is
                for future in step.futures:
                    if not future.done():
                        future.set_exception(error)
            finally:
                for one in jobs.values():
                    one.method.close()

    def _turn(self, step: Step, jobs: dict[int, _Job], job: int, r: int) -> None:
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
        if one.outcome is None:
            one.advance(reply)
        if r == step.rounds[job]:
            if one.outcome is None:
                raise WireMismatch(f"job {job} declared {r} messages and wants to send more")
            step.futures[job].set_result(one.outcome)
        else:
            message = one.wanted or _EMPTY
            self._sent += 1
            if self._observe is not None:
                self._observe(f"{message.combine.value} of {message.nbytes} bytes, job {job} round {r}", self._sent)
            one.under_way = self.channel.start(message)


_EMPTY = Message((torch.empty(0, dtype=torch.uint8),), Combine.SUM)
