"""The best evaluation so far and the count of an early stop in a checkpoint: metadata alone, equal on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from gossamer.run.watch import Watch
from gossamer.store.stateful import Stateful, StateSlice, StateSource


@dataclass(frozen=True, slots=True)
class SavedWatch(Stateful):
    """What a run knows of its evaluations."""

    prefixes: ClassVar[tuple[str, ...]] = ()

    watch: Watch

    def slices(self) -> Iterator[StateSlice]:
        return iter(())

    def meta(self) -> Mapping[str, Any]:
        found = self.watch.meta()
        return {"watch": found} if found else {}

    def check(self, source: StateSource) -> None:
        pass

    def restore(self, source: StateSource) -> str:
        return self.watch.restore(source.meta.get("watch", {}))
