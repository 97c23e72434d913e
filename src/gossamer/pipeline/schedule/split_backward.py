"""SplitBackward: the gradient of a stage's input leaves before that of its weights is made (Zero Bubble's B and W).

Order: that of `inner`, with every B as B_INPUT and B_WEIGHT: the stage before waits for the first of them only.
Paper: Qi et al., arXiv:2401.10241, section 2; here W follows its B at once, and fills no bubble.
Work:  what of the graph lies between both is walked twice.   Good when: there are many stages.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gossamer.pipeline.passes import with_split_backward
from gossamer.pipeline.schedule import PipelineSchedule, Schedule
from gossamer.pipeline.schedule._wrapper import ScheduleWrapper
from gossamer.pipeline.schedule.one_f_one_b import OneFOneB


@dataclass(frozen=True, slots=True)
class SplitBackward(ScheduleWrapper):
    """A wrapper that splits every backward of any other pipeline schedule."""

    inner: PipelineSchedule = field(default_factory=OneFOneB)

    def changed(self, made: Schedule) -> Schedule:
        return with_split_backward(made)

    @property
    def splits_backward(self) -> bool:
        return True
