"""Zeroth-order steps: forward passes through the stages, and a log from which a process can replay them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from gossamer.comm.comm_thread import CommThread
from gossamer.model.split.recompute import BufferValues, copy_buffers, in_place_of
from gossamer.run.forward import Pipeline, run_forward
from gossamer.run.step_algorithm import At, ReplayedSteps, StepAlgorithm, StepAttempt
from gossamer.run.step_log import NAME, StepLog
from gossamer.run.step_runner import ModelPart
from gossamer.run.task import Task
from gossamer.sync import StepAgreement, StepMessage, ZerothOrderRank


@dataclass(slots=True, kw_only=True)
class ZerothOrderStep(StepAlgorithm):
    """A step algorithm that updates parameters from loss values alone, without gradients.

    `rate`: the base learning rate of the plain optimizer, which the schedule's factors multiply. All forwards of a step
    start from the same buffers and draw the same random numbers; the buffers of the first forward are kept.
    """

    probing: ZerothOrderRank
    module: nn.Module
    pieces: Mapping[int, ModelPart]
    pipeline: Pipeline
    pump: CommThread
    rate: float
    clip: float
    log: StepLog
    at: At
    _before: BufferValues = field(default_factory=list)
    _compute_s: float = 0.0

    def attempt(self, task: Task) -> StepAttempt:
        step, self._compute_s = task.window.step, 0.0
        self.at(step, "compute")
        names = {name for name, _ in self.module.named_buffers(remove_duplicate=False)}
        self._before = copy_buffers(self.module, names)
        looks = iter(range(2 * self.probing.probe.directions))
        vote = self.probing.look(step, lambda: self._loss(task, is_first=next(looks) == 0))
        return StepAttempt(vote, self._compute_s)

    def _loss(self, task: Task, *, is_first: bool) -> float:
        """Return the mean loss over this rank's valid labels, at the current parameters."""
        began = time.perf_counter()
        pipeline = self.pipeline.forward_only(len(task.pieces))
        there = [] if is_first else [(space, name, copy.clone()) for space, name, copy in self._before]
        with in_place_of(there):
            step = task.window.step
            moves = partial(self.at, step, "compute")
            means = run_forward(self.pump, self.pieces, pipeline, task.pieces, step=step, moves=moves)
        total = sum(task.weights.values())
        parts = [float(means[n]) * weight / total for n, weight in task.weights.items() if weight]
        self._compute_s += time.perf_counter() - began
        return sum(parts)

    def commit(self, task: Task, agreement: StepAgreement, *, updates: int) -> None:
        assert agreement.beside is not None
        heard = self._heard(task, bytes(agreement.beside.flatten().tolist()))
        self.probing.take(heard)
        self.log.tell(heard)

    def reject(self, task: Task) -> None:
        self.log.tell(self._heard(task, b""))

    def _heard(self, task: Task, codes: bytes) -> StepMessage:
        now = ((space[name], copy) for space, name, copy in self._before)
        return StepMessage(
            step=task.window.step,
            rate=self.rate * task.window.lr,
            clip=self.clip,
            labels=tuple(self.probing.replica.weights().tolist()),
            codes=codes,
            buffers=any(there is None or not torch.equal(there, copy) for there, copy in now),
        )

    def begin(self, done: int, until: int) -> ReplayedSteps:
        past, mark = self.log.past(), self.probing.checksum(done)
        is_other = until > done and past.is_elsewhere(mark)
        ahead = sum(1 for _ in past.after(mark, until))
        steps = list(past.after(mark, done + int(self.probing.replica.gather((float(ahead),)).min())))
        for heard in steps:
            self.at(heard.step, "replay")
            self.probing.take(heard)
        self.log.tell(self.probing.agreed(self.probing.checksum(done + len(steps), begins=True)))
        told = f"took steps {done + 1} to {done + len(steps)} again, from what was kept of them" if steps else ""
        if is_other:
            told = f"{NAME} leads on from other parameters after step {done} than these: its steps are not taken again"
        return ReplayedSteps(len(steps), sum(not heard.codes for heard in steps), told)

    def settle(self, done: int) -> None:
        self.log.tell(self.probing.agreed(self.probing.checksum(done)))

    def close(self) -> None:
        """Do nothing: nothing was put on the model."""
