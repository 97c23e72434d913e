"""Slices: the position of a tensor in a global tensor, and the replica whose state it is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

Extent: TypeAlias = tuple[int, ...]

REPLICATED = -1


@dataclass(frozen=True, slots=True)
class Slice:
    """The box `start .. start + size` of the global tensor `name` of shape `shape`; all three in elements per dim.

    `replica` is the rank whose state the tensor is where ranks differ (a residual, a generator), or -1 where it is
    replicated. (name, replica) identifies one global tensor; its slices tile it.
    """

    name: str
    shape: Extent
    start: Extent
    size: Extent
    replica: int = REPLICATED

    def __post_init__(self) -> None:
        dims = zip(self.start, self.size, self.shape, strict=False)
        fits = len(self.start) == len(self.size) == len(self.shape)
        if not fits or any(at < 0 or size < 0 or at + size > whole for at, size, whole in dims):
            raise ValueError(f"{self.name}: start {self.start} + size {self.size} is not inside shape {self.shape}")
        if self.replica < REPLICATED:
            raise ValueError(f"{self.name}: wanted a rank as replica, or -1 for equal values, got {self.replica}")

    @staticmethod
    def whole(name: str, shape: Extent, replica: int = REPLICATED) -> Slice:
        """Return the slice that covers the complete tensor `name` of shape `shape`."""
        shape = tuple(shape)
        return Slice(name, shape, (0,) * len(shape), shape, replica)

    @property
    def numel(self) -> int:
        """The number of elements in the box."""
        return math.prod(self.size)

    @property
    def is_whole(self) -> bool:
        return self.size == self.shape

    def overlap(self, start: Extent, size: Extent) -> tuple[Extent, Extent] | None:
        """Return (start, size) of the overlap with another box of the same tensor; None where they do not overlap."""
        low = tuple(max(a, b) for a, b in zip(self.start, start, strict=True))
        high = tuple(min(a + n, b + m) for a, n, b, m in zip(self.start, self.size, start, size, strict=True))
        if any(a >= b for a, b in zip(low, high, strict=True)):
            return None
        return low, tuple(b - a for a, b in zip(low, high, strict=True))

    def __str__(self) -> str:
        """Return the name in messages and shard keys: "w[0:4,0:8]@rank1"; plain "w" for all of a replicated tensor."""
        box = ",".join(f"{a}:{a + n}" for a, n in zip(self.start, self.size, strict=True))
        part = "" if self.is_whole else f"[{box}]"
        return f"{self.name}{part}" + ("" if self.replica == REPLICATED else f"@rank{self.replica}")


NamedSlice: TypeAlias = tuple[Slice, Tensor]  # the tensor has the slice's size
