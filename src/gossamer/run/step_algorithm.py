"""Step algorithms: compute an update from the gradients of a backward pass, or from loss values alone (zeroth order).

The trainer fetches the batch, gathers the votes and decides; a step algorithm does the work in between.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gossamer.comm.comm_thread import CommThread
from gossamer.ops.norm import scale_
from gossamer.pipeline.executor import execute
from gossamer.pipeline.rank_backend import RankBackend
from gossamer.pipeline.tied_weights import TiedWeights
from gossamer.run.forward import Pipeline, transfers_of
from gossamer.run.step_runner import ModelPart, StepHooks, StepRunner
from gossamer.run.step_vectors import StepVectors
from gossamer.run.task import Task
from gossamer.sharding import ShardedOptimizer
from gossamer.spec.action import Op
from gossamer.sync import GradientReducer, StepAgreement, StepVote

At = Callable[[int, str], None]


@dataclass(frozen=True, slots=True)
class StepAttempt:
    """The result of an attempt at a step on one rank, before the votes of the others: vote and compute seconds."""

    vote: StepVote
    compute_s: float


@dataclass(frozen=True, slots=True)
class ReplayedSteps:
    """The steps that were replayed from the log: how many, how many of these were rejected, and a note for the user."""

    steps: int = 0
    rejected: int = 0
    told: str = ""


class StepAlgorithm(ABC):
    """A step algorithm on one rank.

    An attempt holds its result until it is committed or rejected; it changes nothing else before.
    """

    @abstractmethod
    def attempt(self, task: Task) -> StepAttempt:
        """Compute from the batch to the vote on the step. The gradient reducer has begun the step before."""

    @abstractmethod
    def commit(self, task: Task, agreement: StepAgreement, *, updates: int) -> None:
        """Commit the step: update the parameters. `updates`: the number of updates made before."""

    @abstractmethod
    def reject(self, task: Task) -> None:
        """Reject the step: leave the parameters unchanged."""

    @abstractmethod
    def begin(self, done: int, until: int) -> ReplayedSteps:
        """Replay logged steps after `done` up to `until`, before the first step of this process.

        All ranks must call it, after the state of step `done` has been restored.
        """

    @abstractmethod
    def settle(self, done: int) -> None:
        """Complete pending work before a checkpoint after `done` steps. All ranks must call it."""

    @abstractmethod
    def close(self) -> None:
        """Take off the model what was put on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """The computation of the mean gradient: this rank's micro-batches through the stages, averaged over replicas."""

    pieces: Mapping[int, ModelPart]  # the stages of the model that this rank holds
    pipeline: Pipeline
    tied: TiedWeights
    pump: CommThread
    replica: GradientReducer
    at: At

    def attempt(self, task: Task) -> StepRunner:
        """Run forward and backward of all micro-batches and average the gradients in the reducer's buckets.

        Return the runner of the step, which holds the losses and the seconds of compute.

        The reducer has begun the step before. Raises PeerLost.
        """
        window = task.window
        key = (window.seed, window.step)
        work = StepRunner(
            pieces=self.pieces,
            stages=self.pipeline.schedule.stages,
            task=task,
            labels=self.replica.labels if window.together else lambda: window.weight,
            transfers=transfers_of(self.pump, self.pieces, self.pipeline, task.pieces, key),
            recomputed=frozenset((a.stage, a.batch) for a in self.pipeline.row if a.op is Op.RECOMPUTE),
            hooks=StepHooks(
                on_last_backward=self.replica.watch,
                on_reduce=lambda: self._reduce_of(work),
                moves=lambda: self.at(window.step, "compute"),
            ),
        )
        self.replica.open(window)
        self.at(window.step, "compute")
        execute(self.pipeline.schedule, RankBackend(self.pipeline.rank, work))
        return work

    def _reduce_of(self, work: StepRunner) -> None:
        """Average the gradients after all backward passes, whose hooks may have waited: that was no computing."""
        work.compute_s = max(0.0, work.compute_s - self.replica.timing.exposed_s)
        self.reduce(work.task.window.step)

    def reduce(self, step: int) -> None:
        """Average the gradients over the ranks, and sum those of tied weights. All ranks call it once per step."""
        self.at(step, "exchange")
        self.replica.reduce()
        self.tied.add(self.replica.gradients(), self.pump)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientStep(StepAlgorithm):
    """A step by backpropagation: forward and backward through the stages, gradient clipping, optimizer update."""

    gradients: Gradients
    states: ShardedOptimizer
    vectors: StepVectors
    clip: float

    @property
    def replica(self) -> GradientReducer:
        return self.gradients.replica

    def attempt(self, task: Task) -> StepAttempt:
        with self.vectors.open():
            work = self.gradients.attempt(task)
        self.states.restrict(self.replica.gradients())
        return StepAttempt(StepVote(work.loss(), speaks=work.speaks), work.compute_s)

    def commit(self, task: Task, agreement: StepAgreement, *, updates: int) -> None:
        window = task.window
        if self.clip and agreement.norm > self.clip:
            scale_(self.replica.flats(), self.clip / (agreement.norm + 1e-6))
        self.replica.commit()
        apart = window.level != "all"
        idle = agreement.idle - self.gradients.tied.holders.keys()  # of those each stage knows its own part
        gradients = {name: one for name, one in self.replica.gradients().items() if name not in idle}
        self.states.see(self.vectors.mean(window, gradients.keys()))
        self.states.update(gradients, lr_scale=window.lr, step=updates, apart=apart)
        if not apart and not self.gradients.pipeline.together:
            self.states.missed(idle)
        began = time.perf_counter()
        self.states.gather(self.replica.layouts, self.gradients.pump, key=(window.seed, window.step))
        self.replica.timing.exposed_s += time.perf_counter() - began

    def reject(self, task: Task) -> None:
        self.replica.reject()

    def begin(self, done: int, until: int) -> ReplayedSteps:
        return ReplayedSteps()  # gradients are not kept

    def settle(self, done: int) -> None:
        """Do nothing: no work is pending after a step."""

    def close(self) -> None:
        self.vectors.hooks.remove()
