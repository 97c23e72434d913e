"""Pipeline schedules that change the schedule of another one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from gossamer.pipeline.schedule import PipelineSchedule, Schedule, StageCosts


class ScheduleWrapper(PipelineSchedule):
    """The base class of pipeline schedules around another schedule, their field `inner`; a frozen dataclass."""

    inner: PipelineSchedule

    @abstractmethod
    def changed(self, made: Schedule) -> Schedule:
        """Return the inner schedule with the wrapper's changes."""

    def make(
        self,
        *,
        stages: int,
        ranks: int,
        microbatches: int,
        costs: Sequence[StageCosts] | None = None,
        memory_cap: Sequence[int] | None = None,
    ) -> Schedule:
        return self.changed(
            self.inner.make(stages=stages, ranks=ranks, microbatches=microbatches, costs=costs, memory_cap=memory_cap)
        )

    @property
    def splits_backward(self) -> bool:
        return self.inner.splits_backward
