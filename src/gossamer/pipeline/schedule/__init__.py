"""Pipeline schedules, one builder per file: from stages and micro-batches to one list of actions per rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from gossamer.pipeline.schedule._costs import StageCosts
from gossamer.pipeline.schedule._schedule import Schedule
from gossamer.spec.registry import Registry

__all__ = ["REGISTRY", "Schedule", "PipelineSchedule", "StageCosts", "build", "names"]


class PipelineSchedule(ABC):
    """The base class of pipeline schedules; each is a frozen dataclass of its parameters."""

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
        """Return the compute actions and the placement of the stages; `passes` add the other actions.

        costs: per stage, for schedules that use them (None: equal costs); memory_cap: bytes per rank (None: no limit).
        Raises BadInput where the schedule does not support these numbers.
        """

    @property
    def splits_backward(self) -> bool:
        """Return whether the gradients of parameters are made after those of the stage's inputs, by themselves."""
        return False


REGISTRY: Registry[PipelineSchedule] = Registry(__name__, PipelineSchedule)  # type: ignore[type-abstract]
names = REGISTRY.names
build = REGISTRY.build
