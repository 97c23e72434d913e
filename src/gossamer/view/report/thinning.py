"""Curves of any length as few points, with the extremes kept: a spike of one step in 100,000 stays to be seen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Points:
    """A curve: ascending `xs`, and finite `ys` of the same length."""

    xs: tuple[float, ...]
    ys: tuple[float, ...]

    @staticmethod
    def of(xs: Sequence[float], ys: Sequence[float]) -> Points:
        """Return the finite points of a curve."""
        if all(map(math.isfinite, ys)):
            return Points(tuple(xs), tuple(ys))
        kept = [(x, y) for x, y in zip(xs, ys, strict=True) if math.isfinite(y)]
        return Points(tuple(x for x, _ in kept), tuple(y for _, y in kept))

    def __len__(self) -> int:
        return len(self.xs)

    def extremes(self, parts: int) -> Points:
        """Return first, lowest, highest and last point of each of `parts` equal parts: at most 4 * parts points."""
        if len(self) <= 4 * parts:
            return self
        kept: list[int] = []
        for lower, upper in _bounds(len(self), parts):
            inside = range(lower, upper)
            at = {lower, upper - 1, min(inside, key=self.ys.__getitem__), max(inside, key=self.ys.__getitem__)}
            kept += sorted(at)
        return Points(tuple(self.xs[i] for i in kept), tuple(self.ys[i] for i in kept))

    def means(self, parts: int) -> Points:
        """Return the mean of each of `parts` equal parts, at its middle; the curve itself where it is shorter."""
        if len(self) <= parts:
            return self
        bounds = list(_bounds(len(self), parts))
        xs = tuple((self.xs[lower] + self.xs[upper - 1]) / 2 for lower, upper in bounds)
        return Points(xs, tuple(sum(self.ys[lower:upper]) / (upper - lower) for lower, upper in bounds))


def _bounds(count: int, parts: int) -> list[tuple[int, int]]:
    """Return the parts as [from, to) of indices; none is empty where count >= parts."""
    return [(part * count // parts, (part + 1) * count // parts) for part in range(parts)]
