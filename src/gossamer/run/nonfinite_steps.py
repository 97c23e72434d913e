"""Non-finite steps of one rank: the decision about each, and its words for the user."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gossamer.run.loss_scale import LossScale
from gossamer.run.nonfinite_cause import NonFiniteSite, Ranks, cause_of
from gossamer.run.nonfinite_policy import NonFiniteAction, NonFinitePolicy
from gossamer.run.rank_stages import RankStages
from gossamer.run.task import Task
from gossamer.sharding import ShardedOptimizer
from gossamer.sync import GradientReducer, StepAgreement


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFiniteSteps:
    """The policy for non-finite steps with the loss scale that it may lower, and the search for the cause."""

    policy: NonFinitePolicy
    scaling: LossScale
    stages: RankStages
    replica: GradientReducer
    states: ShardedOptimizer

    def judge(self, agreement: StepAgreement) -> NonFiniteAction:
        """Return the action after one attempt at a step."""
        return self.policy.judge(agreement, self.scaling)

    def advice(self, task: Task, agreement: StepAgreement, *, updates: int, again: Callable[[], object]) -> str:
        """Return advice about non-finite steps.

        If no update was made before, `again` runs the step once more to find the cause, on all ranks that agreed on it.
        """
        if updates:
            return "Lower the learning rate, check the samples named in records.jsonl"
        apart = {name: own for name, (_, _, own) in self.states.sharded.items()}
        window, sight = task.window, NonFiniteSite(self.stages.engine.module, apart)
        with sight.watching():
            again()
        level = "" if window.level == "all" else window.level
        levels = self.replica.levels
        ranks = Ranks(
            gather=lambda row: self.replica.gather(row, level),
            numbers=levels.group(level, self.replica.rank) if level else levels.everyone,
            bad=agreement.bad_ranks,
        )
        rows = [piece.rows for piece in task.pieces.values()]
        cause = cause_of(sight, min(self.stages.pieces, default=0), rows, self.replica.gradients(), ranks)
        said = f"No update was made before, so the learning rate is not the cause: {cause.told(agreement.loss)}"
        return f"{said}. The samples are named in records.jsonl; leave them out"

    def error(self, step: int, agreement: StepAgreement, advice: str) -> str:
        """Return the message with which the run stops after `step`, counted from 0."""
        return (
            f"step {step + 1}: {why_rejected(agreement)}, {self.policy.in_a_row} rejected steps in a row. {advice}, "
            "or set train.on_nonfinite: skip"
        )


def why_rejected(agreement: StepAgreement) -> str:
    """Return which numbers are not finite, and where."""
    ranks = ", ".join(str(r) for r in agreement.bad_ranks)
    return f"loss {agreement.loss:.4g} and gradient norm {agreement.norm:.4g} are not finite on rank {ranks}"
