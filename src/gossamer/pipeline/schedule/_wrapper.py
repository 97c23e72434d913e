"""Makers that change what another one has made."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from gossamer.pipeline.schedule import PipelineSchedule, Schedule, StageCosts


class ScheduleWrapper(PipelineSchedule):
    """A frozen dataclass with a maker for its field `inner`."""

    inner: PipelineSchedule

    @abstractmethod
    def changed(self, made: Schedule) -> Schedule:
        """What becomes of the inner maker's schedule."""

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
