"""Majority vote among three ranks that computed the same work."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor


class Majority(Enum):
    """The outcome of a vote among three ranks: the one that disagrees with the other two.

    NOBODY: all agree. UNDECIDED: no pair agrees, or two of the three pairs do.
    """

    NOBODY = -1
    FIRST = 0
    SECOND = 1
    THIRD = 2
    UNDECIDED = 3


def odd_one(first_second: bool, first_third: bool, second_third: bool) -> Majority:
    """Return the outcome of the vote from which pairs agree."""
    agreeing = (first_second, first_third, second_third)
    if all(agreeing):
        return Majority.NOBODY
    if sum(agreeing) != 1:
        return Majority.UNDECIDED
    return (Majority.THIRD, Majority.SECOND, Majority.FIRST)[agreeing.index(True)]


def distance(a: Tensor, b: Tensor) -> float:
    """Return the relative distance of two rows (loss, valid labels, norm, projections...).

    The distance is inf for rows with unequal numbers of valid labels: those are of other samples.
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
    """The fingerprints of one rank's gradient from three `ranks`; the first of them is the rank that did the work."""

    ranks: tuple[int, int, int]
    rows: tuple[Tensor, Tensor, Tensor]

    @property
    def distances(self) -> tuple[float, float, float]:
        """Return the distances of first and second, first and third, second and third."""
        a, b, c = self.rows
        return distance(a, b), distance(a, c), distance(b, c)

    def word(self, tolerance: float) -> Majority:
        """Return the outcome of the vote; two rows agree if their distance is at most `tolerance`."""
        return odd_one(*(d <= tolerance for d in self.distances))

    def odd(self, tolerance: float) -> tuple[int, float] | None:
        """Return the outvoted rank and its distance to the nearer of the other two; None if no rank is outvoted."""
        word = self.word(tolerance)
        if word in (Majority.NOBODY, Majority.UNDECIDED):
            return None
        first, second, third = self.distances
        near = {Majority.FIRST: (first, second), Majority.SECOND: (first, third), Majority.THIRD: (second, third)}
        return self.ranks[word.value], min(near[word])
