"""How a step comes to its update: by the gradients of a backward pass, or by what losses alone say.

The trainer has a batch, an agreement and a verdict whichever it is; what lies between is a descent's.
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
from gossamer.run.batches import MicroBatch
from gossamer.run.forward import Pipeline, transfers_of
from gossamer.run.step_runner import ModelPart, StepRunner
from gossamer.sharding import ShardedOptimizer
from gossamer.spec.action import Op
from gossamer.sync import GradientReducer, StepAgreement, StepContext, StepVote

At = Callable[[int, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A step as a rank has it to do: the circumstances, its micro-batches by number, and their valid labels."""

    window: StepContext
    pieces: Mapping[int, MicroBatch]
    weights: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class StepAttempt:
    """What it came to, but for what the others say."""

    vote: StepVote
    compute_s: float


@dataclass(frozen=True, slots=True)
class ReplayedSteps:
    """Steps that were taken again, out of what was kept of them: how many, how many of these were rejected, and what to
    tell the user.
    """

    steps: int = 0
    rejected: int = 0
    told: str = ""


class StepAlgorithm(ABC):
    """One rank's. What a step finds is held until it is committed or rejected; nothing else moves before."""

    @abstractmethod
    def attempt(self, task: Task) -> StepAttempt:
        """From the batch to what is voted on. The replica has begun the step."""

    @abstractmethod
    def commit(self, task: Task, agreement: StepAgreement, *, updates: int) -> None:
        """The step takes effect: the parameters move, `updates` having been made before."""

    @abstractmethod
    def reject(self, task: Task) -> None:
        """It does not."""

    @abstractmethod
    def begin(self, done: int, until: int) -> ReplayedSteps:
        """Before the first step of a process, `done` having been restored: take again what is known of later ones, up
        to `until`. All ranks call it.
        """

    @abstractmethod
    def settle(self, done: int) -> None:
        """Before a checkpoint after `done` steps. All ranks call it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """A rank's part in the mean gradient: from its micro-batches, through the stages and over the replicas."""

    pieces: Mapping[int, ModelPart]  # the stages of the model that this rank holds
    pipeline: Pipeline
    tied: TiedWeights
    pump: CommThread
    replica: GradientReducer
    at: At

    def attempt(self, task: Task) -> StepRunner:
        """Leave the mean gradient in the replica's buckets. The replica has begun the step. Raises PeerLost."""
        window = task.window
        key = (window.seed, window.step)
        work = StepRunner(
            pieces=self.pieces,
            stages=self.pipeline.schedule.stages,
            step=window.step,
            microbatches=task.pieces,
            weights=task.weights,
            labels=self.replica.labels if window.together else lambda: window.weight,
            scale=window.scale,
            transfers=transfers_of(self.pump, self.pieces, self.pipeline, task.pieces, key),
            recomputed=frozenset((a.stage, a.batch) for a in self.pipeline.row if a.op is Op.RECOMPUTE),
            on_last_backward=self.replica.watch,
            on_reduce=lambda: self.reduce(window.step),
            moves=lambda: self.at(window.step, "compute"),
        )
        self.replica.open(window)
        self.at(window.step, "compute")
        execute(self.pipeline.schedule, RankBackend(self.pipeline.rank, work))
        return work

    def reduce(self, step: int) -> None:
        """What the ranks have, made one. All of them call it once in a step."""
        self.at(step, "exchange")
        self.replica.reduce()
        self.tied.add(self.replica.gradients(), self.pump)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientStep(StepAlgorithm):
    """Forward and backward through the stages; the mean gradient, clipped, through the update rule."""

    gradients: Gradients
    states: ShardedOptimizer
    clip: float

    @property
    def replica(self) -> GradientReducer:
        return self.gradients.replica

    def attempt(self, task: Task) -> StepAttempt:
        work = self.gradients.attempt(task)
        return StepAttempt(StepVote(work.loss(), speaks=work.speaks), work.compute_s)

    def commit(self, task: Task, agreement: StepAgreement, *, updates: int) -> None:
        window = task.window
        if self.clip and agreement.norm > self.clip:
            scale_(self.replica.flats(), self.clip / (agreement.norm + 1e-6))
        self.replica.commit()
        apart = window.level != "all"
        idle = agreement.idle - self.gradients.tied.holders.keys()  # of those each stage knows its own part
        gradients = {name: one for name, one in self.replica.gradients().items() if name not in idle}
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
        """Nothing is under way."""
