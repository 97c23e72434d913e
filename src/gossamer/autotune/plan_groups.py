"""The process groups of a plan, and whether its ranks average gradients at every step."""

from __future__ import annotations

from gossamer.comm.message import ProcessGroups
from gossamer.pipeline.stage_links import levels_of_stages
from gossamer.recipe import PlanMethods
from gossamer.spec.plan import Plan
from gossamer.sync import OuterLoopConfig


def levels_of(plan: Plan, ranks: int) -> ProcessGroups:
    """Return the process groups of a plan's links."""
    if plan.mesh.pipe > 1:
        return levels_of_stages(plan)
    if not plan.islands:
        return ProcessGroups.flat(ranks)
    levels = ProcessGroups.islands(plan.islands)
    return levels if outer_loop_of(plan) is None else levels.twice()


def outer_loop_of(plan: Plan) -> OuterLoopConfig | None:
    """Return the outer loop of local-update training; None for synchronous training, or if that is not chosen yet."""
    return PlanMethods.of(plan).sync.loop


def is_synchronous(plan: Plan) -> bool:
    """Return whether all ranks average gradients at every step; also True if that is not chosen yet."""
    return PlanMethods.of(plan).sync.is_plain
