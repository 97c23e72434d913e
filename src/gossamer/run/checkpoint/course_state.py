"""The state of a distillation in a checkpoint: how far it has come, and which teacher it has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from gossamer.run.teacher import CourseState
from gossamer.store.stateful import Stateful, StateSlice, StateSource


@dataclass(frozen=True, slots=True)
class SavedCourse(Stateful):
    """The course of a distillation."""

    prefixes: ClassVar[tuple[str, ...]] = ()

    course: CourseState

    def slices(self) -> Iterator[StateSlice]:
        return iter(())

    def meta(self) -> Mapping[str, Any]:
        return {"distillation": self.course.meta()}

    def check(self, source: StateSource) -> None:
        pass

    def restore(self, source: StateSource) -> str:
        return self.course.restore(source.meta.get("distillation", {}))
