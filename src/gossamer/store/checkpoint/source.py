"""A checkpoint as a source of state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gossamer.store.checkpoint.read import Checkpoint
from gossamer.store.slices import REPLICATED, Slice
from gossamer.store.stateful import StateSource, TensorKind


@dataclass(frozen=True, slots=True)
class CheckpointSource(StateSource):
    """The saved state in a checkpoint on disk; a slice is read, and its checksum compared, when it is asked for."""

    checkpoint: Checkpoint

    @property
    def label(self) -> str:
        return str(self.checkpoint.folder)

    @property
    def meta(self) -> Mapping[str, Any]:
        return self.checkpoint.meta

    def names(self) -> frozenset[str]:
        return frozenset(self.checkpoint.names())

    def versions(self, name: str) -> tuple[int, ...]:
        return self.checkpoint.replicas(name)

    def kind(self, name: str, version: int = REPLICATED) -> TensorKind:
        return self.checkpoint.shape(name, version), self.checkpoint.dtype(name, version)

    def read(self, where: Slice) -> Tensor:
        return self.checkpoint.read(where.name, where.start, where.size, where.replica)
