"""The stage links of a pipeline, from each stage to the next one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from gossamer.comm.message import ProcessGroups
from gossamer.p2p import StageLink, TensorSpec
from gossamer.p2p.activation import ActivationCodec
from gossamer.p2p.activation.none import NoCompression
from gossamer.pipeline.schedule import Schedule
from gossamer.spec.plan import Plan

StageLinks = Mapping[tuple[int, int], StageLink]  # (stage that sends, micro-batch) -> link to the next stage


def links_of(
    plan: Plan,
    levels: ProcessGroups,
    schedule: Schedule,
    replica: int,
    activation: Sequence[ActivationCodec],
) -> StageLinks:
    """Return the stage links of one replica with this schedule, by (stage, micro-batch).

    A micro-batch that stays on its rank has none. `activation`: the codec of every stage boundary.
    """
    mesh = plan.axes
    found: dict[tuple[int, int], StageLink] = {}
    for stage in range(schedule.stages - 1):
        for batch in range(schedule.microbatches):
            if schedule.crosses(stage, batch):
                found[stage, batch] = StageLink(
                    source=mesh.rank(replica, schedule.rank_of(stage, batch)),
                    target=mesh.rank(replica, schedule.rank_of(stage + 1, batch)),
                    levels=levels,
                    level="pipe",
                    crossing=activation[stage],
                    name=str(stage),
                )
    return found


def way_of(link: StageLink, form: TensorSpec) -> StageLink:
    """Return `link` for a tensor of shape and dtype `form`.

    Tensors that are not floating point (masks, positions) must arrive exactly, so they are sent without compression.
    Raises BadInput where the codec cannot send the tensor.
    """
    way = link if form.dtype.is_floating_point else replace(link, crossing=NoCompression())
    way.crossing.check(form)
    return way
