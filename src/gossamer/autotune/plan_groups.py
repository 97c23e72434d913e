"""The process groups of a plan."""

from __future__ import annotations

from gossamer.comm.message import ProcessGroups
from gossamer.pipeline.stage_links import levels_of_stages
from gossamer.recipe import PlanMethods
from gossamer.spec.plan import Plan


def levels_of(plan: Plan, ranks: int) -> ProcessGroups:
    """Return the process groups of a plan's links."""
    if plan.mesh.pipe > 1:
        return levels_of_stages(plan)
    if not plan.islands:
        return ProcessGroups.flat(ranks)
    levels = ProcessGroups.islands(plan.islands)
    return levels if PlanMethods.of(plan).sync.loop is None else levels.twice()
