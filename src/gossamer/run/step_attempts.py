"""Attempts at a step: from its micro-batches to the agreement of the ranks that take part in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gossamer.optimizer.lr_schedule import LRSchedule
from gossamer.run.batches import MicroBatch
from gossamer.run.buffer_rollback import BufferRollback
from gossamer.run.goal import Goal
from gossamer.run.loss_scale import LossScale
from gossamer.run.outer_steps import OuterSteps
from gossamer.run.rank_stages import RankStages
from gossamer.run.step_algorithm import StepAlgorithm, StepAttempt
from gossamer.run.task import Task
from gossamer.run.trainer_services import TrainerServices
from gossamer.sharding import ShardedOptimizer
from gossamer.sync import GradientReducer, StepAgreement, StepContext


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAttempts:
    """The attempts of one rank at its steps: forward, backward, exchange and vote. None of them moves a parameter.

    `undo` restores the buffers of the model that the last attempt changed.
    """

    stages: RankStages
    buffers: BufferRollback
    descent: StepAlgorithm
    replica: GradientReducer
    states: ShardedOptimizer
    outer: OuterSteps
    rate: LRSchedule
    scaling: LossScale
    around: TrainerServices

    def attempt(
        self, step: int, pieces: Mapping[int, MicroBatch], goal: Goal
    ) -> tuple[Task, StepAttempt, StepAgreement]:
        """Make one attempt at `step`; return the work, this rank's result, and what the ranks agreed on."""
        self.buffers.keep()
        self.states.release()  # reshard what an evaluation has gathered: every step gathers the same
        weights = self.stages.weights(pieces)
        together, level = self.stages.pipeline.together, self.outer.sync.level(step)
        mine, scale = sum(weights.values()), self.scaling.factor
        window = StepContext(step, goal.seed, self._factor(step, goal), mine, scale, together, level)
        self.replica.timing.begin()
        self.replica.begin(window)
        task = Task(window=window, pieces=pieces, weights=weights)
        attempt = self.descent.attempt(task)
        waited_s = self.states.waited_s()  # in the midst of forward and backward
        self.replica.timing.exposed_s += waited_s
        attempt = replace(attempt, compute_s=max(0.0, attempt.compute_s - waited_s))
        self.around.at(step, "agree")
        return task, attempt, self.replica.agree(replace(attempt.vote, ask=int(self.around.asked_to_stop())))

    def undo(self) -> str:
        """Restore the buffers from before the last attempt; return a warning for the user, "" for none."""
        lost = self.buffers.put_back()
        if not lost:
            return ""
        more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
        return (
            f"buffers {', '.join(lost[:3])}{more} keep what this attempt wrote, as none before had: no copy was there. "
            "Check them for values that are not finite"
        )

    def _factor(self, step: int, goal: Goal) -> float:
        """Return the factor on the optimizer's learning rate in a step."""
        return self.rate.factor(step, goal.steps) * self.outer.apart.factor
