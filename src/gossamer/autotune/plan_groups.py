"""The process groups of a plan."""

from __future__ import annotations

from gossamer.comm.message import ProcessGroups
from gossamer.recipe import PlanMethods
from gossamer.spec.plan import Plan


def levels_of(plan: Plan) -> ProcessGroups:
    """Return the process groups of a plan's links; islands that train apart also have those beside the steps."""
    levels, loop = ProcessGroups.of(plan.axes), PlanMethods.of(plan).sync.loop
    return levels.twice() if loop is not None and "island" in levels.groups else levels
