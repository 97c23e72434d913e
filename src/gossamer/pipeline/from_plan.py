"""The pipeline schedules that a plan asks for."""

from __future__ import annotations

from collections.abc import Callable

from gossamer.data import share_rows
from gossamer.pipeline.passes import spread, with_transfers
from gossamer.pipeline.schedule import PipelineSchedule, Schedule
from gossamer.pipeline.schedule._assign import deal
from gossamer.pipeline.schedule.forward_only import ForwardOnly
from gossamer.pipeline.validate import check
from gossamer.spec.plan import Plan


def schedule_of(plan: Plan, replica: int, maker: PipelineSchedule) -> Schedule:
    """Return the training schedule of a replica's ranks, made by the plan's `maker`.

    Raises BadInput where the schedule does not support the plan's stages or micro-batches.
    """
    microbatches = plan.microbatches[replica]

    def straight(stages: int) -> Schedule:
        return maker.make(stages=stages, ranks=stages, microbatches=microbatches)

    if plan.stage_ranks:
        lowered = with_transfers(_spread(plan, straight, microbatches))
    else:
        stages = max(1, len(plan.cuts))
        lowered = with_transfers(maker.make(stages=stages, ranks=plan.mesh.pipe, microbatches=microbatches))
    check(lowered)
    return lowered


def forward_only_of(plan: Plan, trained: Schedule, microbatches: int) -> Schedule:
    """Return a forward-only schedule with the stages of schedule `trained`, on the same ranks.

    There may be fewer micro-batches than ranks of a stage.
    """

    def straight(stages: int) -> Schedule:
        return ForwardOnly().make(stages=stages, ranks=stages, microbatches=microbatches)

    if plan.stage_ranks:
        return with_transfers(_spread(plan, straight, microbatches))
    made = ForwardOnly(trained.placement)
    return with_transfers(made.make(stages=trained.stages, ranks=len(trained.ranks), microbatches=microbatches))


def _spread(plan: Plan, straight: Callable[[int], Schedule], microbatches: int) -> Schedule:
    dealt = [_deal(plan, group, microbatches) for group in plan.stage_ranks]
    return spread(straight, plan.stage_ranks, dealt)


def _deal(plan: Plan, group: tuple[int, ...], microbatches: int) -> tuple[int, ...]:
    """By the ranks' shares, one at least; where there are too few for that, the first ranks have one each."""
    if microbatches < len(group):
        return group[:microbatches]
    return deal(group, share_rows(microbatches, [plan.batch_fractions[rank] for rank in group]))
