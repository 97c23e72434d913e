"""Tuning two or more sides fairly: the same number of trials each, on a grid whose best lies inside.

Every side tries its start and the points around it. While the best of a side lies at the border of what it tried, every
side gets one trial more: that side outwards, a side whose best is inside between its best and the better neighbor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tuned:
    """What one side tried: loss by point. A loss that is not finite is worse than any other."""

    tried: dict[float, float]

    @property
    def best(self) -> float:
        return min(self.tried, key=lambda point: (self._loss(point), point))

    @property
    def loss(self) -> float:
        return self.tried[self.best]

    @property
    def is_bracketed(self) -> bool:
        """Return whether worse points lie on both sides of the best."""
        return min(self.tried) < self.best < max(self.tried)

    def following(self, factor: float) -> float:
        """Return the point to try next: outwards from a border, else between the best and its better neighbor."""
        points = sorted(self.tried)
        at = points.index(self.best)
        if at == 0:
            return self.best / factor
        if at == len(points) - 1:
            return self.best * factor
        beside = min(points[at - 1], points[at + 1], key=self._loss)
        return math.sqrt(self.best * beside)

    def told(self) -> dict[str, object]:
        """As it stands in a row."""
        return {
            "best": self.best,
            "at_border": not self.is_bracketed,
            "tried": {f"{point:.3g}": self.tried[point] for point in sorted(self.tried)},
        }

    def _loss(self, point: float) -> float:
        loss = self.tried[point]
        return loss if math.isfinite(loss) else math.inf


def tuned(
    sides: Mapping[str, Callable[[float], float]],
    starts: Mapping[str, float],
    *,
    factor: float = 2.0,
    least: int = 3,
    most: int = 6,
) -> dict[str, Tuned]:
    """Return what each side tried. `least`: trials around the start, an odd number; `most`: trials of a side at most.

    The best still lies at a border where `most` was too few; `Tuned.is_bracketed` says so.
    """
    found = {name: Tuned({}) for name in sides}
    for name, run in sides.items():
        for power in range(-(least // 2), least // 2 + 1):
            point = starts[name] * factor**power
            found[name].tried[point] = run(point)
    count = least
    while count < most and not all(one.is_bracketed for one in found.values()):
        for name, run in sides.items():
            point = found[name].following(factor)
            found[name].tried[point] = run(point)
        count += 1
    return found
