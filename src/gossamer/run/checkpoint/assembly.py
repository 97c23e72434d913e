"""The list of the components whose state a run's checkpoints hold."""

from __future__ import annotations

from gossamer.run.adversarial_step import AdversarialState
from gossamer.run.checkpoint.adversarial_state import SavedAdversarial
from gossamer.run.checkpoint.contents import CheckpointContents
from gossamer.run.checkpoint.course_state import SavedCourse
from gossamer.run.checkpoint.exchange_state import SavedExchanges
from gossamer.run.checkpoint.generators import Generators
from gossamer.run.checkpoint.holders import AllRanks, StageRanks
from gossamer.run.checkpoint.loss_scale_state import SavedLossScale
from gossamer.run.checkpoint.membership import Membership
from gossamer.run.checkpoint.optimizer_state import OptimizerSlots
from gossamer.run.checkpoint.outer_loop_state import OuterLoopState
from gossamer.run.checkpoint.progress import SavedProgress
from gossamer.run.checkpoint.watch_state import SavedWatch
from gossamer.run.checkpoint.weights import Weights
from gossamer.run.goal import Progress
from gossamer.run.loss_scale import LossScale
from gossamer.run.parts import Parts
from gossamer.run.teacher import CourseState
from gossamer.run.watch import Watch
from gossamer.sharding import ShardedOptimizer
from gossamer.sync import GradientReducer, OuterLoop


def contents_of(
    parts: Parts,
    progress: Progress,
    states: ShardedOptimizer,
    replica: GradientReducer,
    apart: OuterLoop,
    scaling: LossScale,
    watch: Watch,
    adversarial: AdversarialState | None = None,
    course: CourseState | None = None,
) -> CheckpointContents:
    """Return the components of one rank's trainer that keep state, in the order in which they are restored.

    The outer loop comes after the weights, among which are its global parameters, and after the optimizer states: an
    island that starts from the global parameters loads them over its own.
    """
    islands = replica.levels.groups["island"] if apart.fragments else ()
    members = Membership(replica.rank, replica.ranks, tuple(tuple(island) for island in islands))
    holders = AllRanks() if parts.cut is None else StageRanks(parts.cut)
    residuals = parts.config.plan.residuals_on_resume
    outer = OuterLoopState(apart, members, residuals)
    components = (
        SavedProgress(progress, members, outer),
        Weights(parts.module, states, holders, members, apart.common, parts.base),
        OptimizerSlots(states, holders, members, outer, parts.config.train.optimizer),
        outer,
        SavedLossScale(scaling, members),
        Generators(members),
        SavedExchanges(replica, members, residuals),
        SavedWatch(watch),
        *([] if adversarial is None else [SavedAdversarial(adversarial)]),
        *([] if course is None else [SavedCourse(course)]),
    )
    return CheckpointContents(components, members, holders, is_in_file=states.tiers is not None)
