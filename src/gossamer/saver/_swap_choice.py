"""Which units swap what they save and which are recomputed, at the least seconds: the cost model of Fuyou, exactly.

Equations (unit u saves a_u bytes and takes r_u seconds for one more forward; S: the units that swap):
    A(S) = sum of a_u, u in S;   R(S) = sum of r_u, u not in S
    T_F = max(comp_F, A(S) / B);   T_B = max(comp_B + R(S), A(S) / B);   S minimizes T_F + T_B
Symbols: comp_F, comp_B seconds that forward and backward compute; B bytes per second of the file.
T_F + T_B falls with neither A nor R. So of two choices for the first units, the one that is no better in either can be
forgotten, and what remains is exact.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapUnit:
    """A unit: the bytes that it saves, the seconds of one more forward, and whether it can be recomputed."""

    size_bytes: int
    seconds: float
    can_recompute: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapCosts:
    """The seconds that forward and backward compute where everything swaps, and the bytes per second of the file."""

    forward_s: float
    backward_s: float
    rate: float

    def seconds(self, size_bytes: int, again_s: float) -> tuple[float, float]:
        """Return (T_F, T_B) where so many bytes swap, and so many seconds of forward are computed again."""
        moved_s = size_bytes / self.rate
        return max(self.forward_s, moved_s), max(self.backward_s + again_s, moved_s)


@dataclass(frozen=True, slots=True)
class _Choice:
    size_bytes: int
    again_s: float
    swapped: tuple[int, ...]


def seconds_of(units: Sequence[SwapUnit], swapped: Collection[int], costs: SwapCosts) -> tuple[float, float]:
    """Return (T_F, T_B) where the units at these indices swap, and the others are recomputed."""
    size_bytes = sum(unit.size_bytes for index, unit in enumerate(units) if index in swapped)
    return costs.seconds(size_bytes, sum(unit.seconds for index, unit in enumerate(units) if index not in swapped))


def fastest_set(units: Sequence[SwapUnit], costs: SwapCosts) -> tuple[int, ...]:
    """Return the indices of the units that swap at the least T_F + T_B; of equal ones the set with the fewest bytes."""
    choices = [_Choice(0, 0.0, ())]
    for index, unit in enumerate(units):
        grown = [_Choice(one.size_bytes + unit.size_bytes, one.again_s, (*one.swapped, index)) for one in choices]
        if unit.can_recompute:
            grown += [_Choice(one.size_bytes, one.again_s + unit.seconds, one.swapped) for one in choices]
        choices = _undominated(grown)
    return min(choices, key=lambda one: (sum(costs.seconds(one.size_bytes, one.again_s)), one.size_bytes)).swapped


def _undominated(choices: Sequence[_Choice]) -> list[_Choice]:
    found = list[_Choice]()
    for one in sorted(choices, key=lambda one: (one.size_bytes, one.again_s)):
        if not found or one.again_s < found[-1].again_s:
            found.append(one)
    return found
