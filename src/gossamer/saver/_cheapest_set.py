"""The cheapest set of units to recompute, so that a forward and backward pass stays within a number of bytes.

Units run one after the other, and backwards in the backward pass. While one runs, in either pass, there is what the
units before it keep, and what it needs itself. So every prefix of a choice is a state of two numbers, kept bytes and
seconds, and of two prefixes the one that is no better in either can be forgotten: what remains is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
    seconds: float
    chosen: tuple[int, ...]


def cheapest_set(units: Sequence[UnitChoice], budget: int) -> tuple[int, ...] | None:
    """Return the indices of the units to recompute at the least seconds within `budget` bytes; None: no set is.

    Of sets that take as long, one that keeps the fewest bytes at the end.
    """
    states = [_Prefix(0, 0.0, ())]
    for index, unit in enumerate(units):
        grown = [
            _Prefix(one.kept + way.kept, one.seconds + seconds, (*one.chosen, index) if is_again else one.chosen)
            for one in states
            for is_again, way, seconds in unit.ways
            if one.kept + max(way.most, way.kept) <= budget
        ]
        states = _undominated(grown)
    return min(states, key=lambda one: (one.seconds, one.kept)).chosen if states else None


def _undominated(states: Sequence[_Prefix]) -> list[_Prefix]:
    found = list[_Prefix]()
    for one in sorted(states, key=lambda one: (one.kept, one.seconds)):
        if not found or one.seconds < found[-1].seconds:
            found.append(one)
    return found


def peak(units: Sequence[UnitChoice], chosen: Sequence[int]) -> int:
    """Return the bytes at the peak where the units `chosen` are recomputed."""
    kept, most = 0, 0
    for index, unit in enumerate(units):
        way = unit.again if index in chosen and unit.again is not None else unit.plain
        most = max(most, kept + max(way.most, way.kept))
        kept += way.kept
    return most


def least_budget(units: Sequence[UnitChoice]) -> int:
    """Return the smallest number of bytes within which there is a set: by bisection, as more bytes allow more sets."""
    low, high = -1, peak(units, ())  # no set is within -1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cheapest_set(units, middle) is None else (low, middle)
    return high
