"""The links of a pipeline: how what a stage makes gets to the next one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from gossamer.compress.transfer import Link
from gossamer.compress.transfer import crossing as crossings
from gossamer.spec.plan import Plan
from gossamer.wire.message import Levels


def links_of(plan: Plan, levels: Levels, placement: Sequence[int], replica: int) -> dict[int, Link]:
    """Those of one replica, by the stage that sends; none between stages of one rank. `placement[stage]` is a rank
    within the replica. Raises BadInput for a way that cannot be built.
    """
    first = replica * plan.mesh.pipe
    found: dict[int, Link] = {}
    for stage, (here, there) in enumerate(pairwise(placement)):
        if here != there:
            found[stage] = Link(
                source=first + here,
                target=first + there,
                levels=levels,
                level="pipe",
                crossing=crossings.build(plan.boundary_of(stage), key="plan.boundary"),
                name=str(stage),
            )
    return found
