"""Schedules, one maker per file: stages x micro-batches become one list of actions per rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from gossamer.pipeline.schedule._costs import StageCosts
from gossamer.pipeline.schedule._schedule import Schedule
from gossamer.spec.registry import Registry

__all__ = ["REGISTRY", "Schedule", "PipelineSchedule", "StageCosts", "build", "names"]


class PipelineSchedule(ABC):
    """A frozen dataclass."""

    @abstractmethod
    def make(
        self,
        *,
        stages: int,
        ranks: int,
        microbatches: int,
        costs: Sequence[StageCosts] | None = None,
        memory_cap: Sequence[int] | None = None,
    ) -> Schedule:
        """Compute actions and the placement of the stages; `passes` add the rest. Raises BadInput where it cannot.

        costs: per stage, for makers that weigh them (None: all alike); memory_cap: bytes per rank (None: no limit).
        """


REGISTRY: Registry[PipelineSchedule] = Registry(__name__, PipelineSchedule)  # type: ignore[type-abstract]
names = REGISTRY.names
build = REGISTRY.build
