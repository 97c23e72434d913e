"""A schedule with recompute: of a micro-batch that waits for its backward a stage keeps what it received alone.

Its forward runs again right before the backward. `plan.savers: [recompute]` puts it around the schedule of the plan.

Order: that of `inner`, with R before every backward.   Live: one micro-batch; of the others the boundary tensors alone.
Paper: Chen et al., arXiv:1604.06174 (here with the stage for a segment); Huang et al., arXiv:1811.06965, section 2.3.
Work:  one forward more per micro-batch.   Good when: activations do not fit.   `memory_cap` is weighed as without it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gossamer.pipeline.passes import with_recompute
from gossamer.pipeline.schedule import PipelineSchedule, Schedule
from gossamer.pipeline.schedule._wrapper import ScheduleWrapper
from gossamer.pipeline.schedule.one_f_one_b import OneFOneB


@dataclass(frozen=True, slots=True)
class Recomputed(ScheduleWrapper):
    """Activation recomputation of whole stages, around any other pipeline schedule."""

    inner: PipelineSchedule = field(default_factory=OneFOneB)

    def changed(self, made: Schedule) -> Schedule:
        return with_recompute(made)
