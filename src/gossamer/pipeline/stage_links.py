"""The links of a pipeline: how what a stage makes gets to the next one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gossamer.comm.message import ProcessGroups
from gossamer.p2p import StageLink, TensorSpec
from gossamer.p2p import activation as crossings
from gossamer.p2p.activation.plain import Plain
from gossamer.pipeline.schedule import Schedule
from gossamer.spec.plan import Plan

StageLinks = Mapping[tuple[int, int], StageLink]  # (stage that sends, micro-batch) -> how it gets to the next stage


def links_of(plan: Plan, levels: ProcessGroups, schedule: Schedule, replica: int) -> StageLinks:
    """Those of one replica, whose schedule it is; none where a micro-batch stays on its rank. Raises BadInput for a way
    that cannot be built.
    """
    first = replica * plan.width
    found: dict[tuple[int, int], StageLink] = {}
    for stage in range(schedule.stages - 1):
        crossing = crossings.build(plan.boundary_of(stage), key="plan.boundary")
        for batch in range(schedule.microbatches):
            if schedule.crosses(stage, batch):
                found[stage, batch] = StageLink(
                    source=first + schedule.rank_of(stage, batch),
                    target=first + schedule.rank_of(stage + 1, batch),
                    levels=levels,
                    level="pipe",
                    crossing=crossing,
                    name=str(stage),
                )
    return found


def levels_of_stages(plan: Plan) -> ProcessGroups:
    """Who meets whom where a model lies in stages."""
    return ProcessGroups.staged(plan.stages) if plan.stages else ProcessGroups.mesh(plan.mesh.replica, plan.mesh.pipe)


def way_of(link: StageLink, form: TensorSpec) -> StageLink:
    """`link` as a tensor of `form` takes it: what is not of floating-point numbers (masks, positions) may lose nothing,
    and crosses as it is. Raises BadInput where the tensor cannot cross so.
    """
    way = link if form.dtype.is_floating_point else replace(link, crossing=Plain())
    way.crossing.check(form)
    return way
