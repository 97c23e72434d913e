"""The links of a pipeline: how what a stage makes gets to the next one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from gossamer.compress.transfer import Form, Link
from gossamer.compress.transfer import crossing as crossings
from gossamer.compress.transfer.crossing.plain import Plain
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


def way_of(link: Link, form: Form) -> Link:
    """`link` as a tensor of `form` takes it: what is not of floating-point numbers (masks, positions) may lose nothing,
    and crosses as it is. Raises BadInput where the tensor cannot cross so.
    """
    way = link if form.dtype.is_floating_point else replace(link, crossing=Plain())
    way.crossing.check(form)
    return way
