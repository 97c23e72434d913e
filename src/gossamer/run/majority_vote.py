"""Who is right, of several that say what the same work comes to."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor


class Majority(Enum):
    """The majority of three: who does not agree with the two others. NOBODY: all agree; UNDECIDED: no two alone do."""

    NOBODY = -1
    FIRST = 0
    SECOND = 1
    THIRD = 2
    UNDECIDED = 3


def odd_one(first_second: bool, first_third: bool, second_third: bool) -> Majority:
    """Given which pairs agree."""
    agreeing = (first_second, first_third, second_third)
    if all(agreeing):
        return Majority.NOBODY
    if sum(agreeing) != 1:
        return Majority.UNDECIDED
    return (Majority.THIRD, Majority.SECOND, Majority.FIRST)[agreeing.index(True)]


def distance(a: Tensor, b: Tensor) -> float:
    """Of two rows (loss, valid labels, norm, projections...), as a part of their size; inf where they cannot be of the
    same samples.
    """
    if a[1] != b[1]:
        return float("inf")
    found = torch.stack([_apart(a[:1], b[:1]), _apart(a[3:], b[3:])])
    return float(torch.nan_to_num(found, nan=torch.inf).max())


def _apart(a: Tensor, b: Tensor) -> Tensor:
    size = torch.maximum(a.norm(), b.norm())
    return (a - b).norm() / size if size > 0 else size


@dataclass(frozen=True, slots=True)
class ThreeWayVote:
    """What three ranks, the first of them the one that did the work, say of it."""

    ranks: tuple[int, int, int]
    rows: tuple[Tensor, Tensor, Tensor]

    @property
    def distances(self) -> tuple[float, float, float]:
        """First and second, first and third, second and third."""
        a, b, c = self.rows
        return distance(a, b), distance(a, c), distance(b, c)

    def word(self, tolerance: float) -> Majority:
        """What the majority says."""
        return odd_one(*(d <= tolerance for d in self.distances))

    def odd(self, tolerance: float) -> tuple[int, float] | None:
        """The rank that is named, and how far it is from the nearer of the others."""
        word = self.word(tolerance)
        if word in (Majority.NOBODY, Majority.UNDECIDED):
            return None
        first, second, third = self.distances
        near = {Majority.FIRST: (first, second), Majority.SECOND: (first, third), Majority.THIRD: (second, third)}
        return self.ranks[word.value], min(near[word])
