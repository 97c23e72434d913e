"""Fractions of measured figures."""

from __future__ import annotations


def part_of(part: float, whole: float) -> float | None:
    """Return `part` as a fraction of `whole`; None where the whole is unknown, or the part is larger.

    In the latter case one of them was measured wrongly, and no figure is better than an impossible one.
    """
    return part / whole if 0 <= part <= whole and whole > 0 else None
