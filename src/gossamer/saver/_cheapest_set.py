"""The cheapest set of units to recompute, so that a forward and backward pass stays within a number of bytes.

Units run one after the other, and backwards in the backward pass. While one runs, in either pass, there is what the
units before it keep, and what it needs itself; in a pipeline stage also all that the other micro-batches `alive` keep.
So every prefix of a choice is a state of three numbers, kept bytes, most bytes and seconds, and of two prefixes the one
that is no better in any can be forgotten: what remains is exact.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitBytes:
    """What a unit takes in one of its two ways.

    `kept`: bytes from its forward to its backward; `most`: bytes at most while it runs, in either pass.
    """

    kept: int
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitChoice:
    """A unit with its two ways. `seconds`: of one more forward; `again` is None for a unit that is not recomputed."""

    seconds: float
    plain: UnitBytes
    again: UnitBytes | None

    @property
    def ways(self) -> tuple[tuple[bool, UnitBytes, float], ...]:
        """Return the ways of this unit: whether it is recomputed, its bytes, the seconds that this costs."""
        plain = (False, self.plain, 0.0)
        return (plain,) if self.again is None else (plain, (True, self.again, self.seconds))


@dataclass(frozen=True, slots=True)
class _Prefix:
    kept: int
    most: int
    seconds: float
    chosen: tuple[int, ...]

    def with_unit(self, index: int, is_again: bool, way: UnitBytes, seconds: float) -> _Prefix:
        most = max(self.most, self.kept + max(way.most, way.kept))
        chosen = (*self.chosen, index) if is_again else self.chosen
        return _Prefix(self.kept + way.kept, most, self.seconds + seconds, chosen)


def cheapest_set(units: Sequence[UnitChoice], budget: int, *, alive: int = 1) -> tuple[int, ...] | None:
    """Return the indices of the units to recompute at the least seconds within `budget` bytes; None: no set is.

    `alive`: how many micro-batches are between their forward and their backward at the peak, that which runs included.
    Of sets that take as long, one that keeps the fewest bytes at the end.
    """
    others, least = alive - 1, _least_after(units)
    states = [_Prefix(0, 0, 0.0, ())]
    for index, unit in enumerate(units):
        grown = (one.with_unit(index, *way) for one in states for way in unit.ways)
        within = [one for one in grown if others * (one.kept + least[index]) + one.most <= budget]
        states = _undominated(within, has_others=others > 0)
    return min(states, key=lambda one: (one.seconds, one.kept)).chosen if states else None


def _least_after(units: Sequence[UnitChoice]) -> list[int]:
    """Return for every unit the bytes that those after it keep at least."""
    least = [min(way.kept for _, way, _ in unit.ways) for unit in units]
    return [0, *accumulate(reversed(least))][-2::-1]


def _undominated(states: Sequence[_Prefix], *, has_others: bool) -> list[_Prefix]:
    """Return the states of which no other is as good in all; `most` counts beside other micro-batches alone."""
    found, steps = list[_Prefix](), list[tuple[float, int]]()  # of those found: seconds rise, most bytes fall
    for one in sorted(states, key=lambda one: (one.kept, one.seconds, one.most)):
        most = one.most if has_others else 0
        place = bisect_right(steps, (one.seconds, most))
        if place and steps[place - 1][1] <= most:
            continue
        found.append(one)
        end = place
        while end < len(steps) and steps[end][1] >= most:
            end += 1
        steps[place:end] = [(one.seconds, most)]
    return found


def peak(units: Sequence[UnitChoice], chosen: Sequence[int], *, alive: int = 1) -> int:
    """Return the bytes at the peak where the units `chosen` are recomputed."""
    kept, most = 0, 0
    for index, unit in enumerate(units):
        way = unit.again if index in chosen and unit.again is not None else unit.plain
        most = max(most, kept + max(way.most, way.kept))
        kept += way.kept
    return (alive - 1) * kept + most


def least_budget(units: Sequence[UnitChoice], *, alive: int = 1) -> int:
    """Return the smallest number of bytes within which there is a set: by bisection, as more bytes allow more sets."""
    low, high = -1, peak(units, (), alive=alive)  # no set is within -1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cheapest_set(units, middle, alive=alive) is None else (low, middle)
    return high
