"""The time limit of a run: the number of steps that fit in its seconds."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gossamer.optimizer.lr_schedule import LRSchedule
from gossamer.run.evaluation import Evaluator
from gossamer.run.goal import Goal
from gossamer.run.trainer_services import Sink
from gossamer.spec import records
from gossamer.spec.errors import BadInput
from gossamer.sync import GradientReducer

_FIRST_STEPS, _FIT_EVERY = 10, 25  # before the pace is first measured; between measurements


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimit:
    """The time limit: fits the number of steps to the run's seconds. Without a limit it changes nothing."""

    most_steps: int  # the configured steps
    rate: LRSchedule
    replica: GradientReducer
    evaluator: Evaluator
    sink: Sink

    def fit(self, goal: Goal, done: int, made: int, spent_s: float) -> Goal:
        """Return the goal with the number of steps that fit at the pace so far; the same on all ranks.

        `done`: steps of the run; `made`: those of this process, in `spent_s` seconds. The learning-rate schedule
        follows the new number of steps.
        """
        if not goal.seconds or done == goal.steps or (made != _FIRST_STEPS and made % _FIT_EVERY):
            return goal
        pace_s = spent_s / made
        left_s = goal.seconds - spent_s - self.evaluator.estimate_s(pace_s)
        fitting = int(self.replica.gather((done + max(0.0, left_s / pace_s),)).min())
        steps = max(done, min(fitting, self.most_steps))
        try:
            self.rate.factor(done, steps)
        except BadInput:  # a warm-up of so many steps, which is longer: the run is cut off where its time is over
            steps = goal.steps if fitting > done else done  # as all ranks agree: their clocks differ
        if abs(steps - goal.steps) <= goal.steps // 100 and steps != done:
            return goal
        self.sink(records.Length(step=done, steps=steps))
        said = f"{pace_s:.3g} s per step: {goal.seconds:.3g} s are enough for {steps} of {self.most_steps} steps"
        self.sink(records.Event(level="info", message=said, step=done))
        return replace(goal, steps=steps)
