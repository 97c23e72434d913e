"""A model source that never gives memory to a parameter: for a run that is looked at and not started."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from gossamer.model.split.constructor_state import ConstructorState
from gossamer.partition.model_provider import ModelProvider


@dataclass(frozen=True, slots=True)
class OutlineSource(ModelProvider):
    """The model of another source, as names and shapes alone, also where a rank would hold all of it."""

    inner: ModelProvider

    def whole(self) -> nn.Module:
        return self.inner.outline()

    def outline(self) -> nn.Module:
        return self.inner.outline()

    def construction(self) -> ConstructorState:
        return self.inner.construction()

    def part(self, holds: frozenset[str]) -> nn.Module:
        return self.inner.outline()

    def digests(self) -> dict[str, int]:
        return {}

    def share(self, ranks: int) -> None:
        self.inner.share(ranks)

    def again(self) -> ModelProvider:
        return self
