"""Range checks for numbers of optimizers and learning-rate schedules; each raises BadInput with the field as key."""

from __future__ import annotations

import math

from gossamer.spec.errors import bad_input


def positive(name: str, value: float) -> None:
    """Raise BadInput unless 0 < value < infinity."""
    if not (math.isfinite(value) and value > 0):
        raise bad_input(wanted="a finite number above 0", got=f"{value:g}", do="give a positive number", key=name)


def not_negative(name: str, value: float) -> None:
    """Raise BadInput unless 0 <= value < infinity."""
    if not (math.isfinite(value) and value >= 0):
        raise bad_input(wanted="a finite number of at least 0", got=f"{value:g}", do="use 0 for none", key=name)


def below_one(name: str, value: float) -> None:
    """Raise BadInput unless 0 <= value < 1."""
    if not 0 <= value < 1:
        raise bad_input(wanted="a number from 0 to below 1", got=f"{value:g}", do="give a number such as 0.9", key=name)


def a_part(name: str, value: float) -> None:
    """Raise BadInput unless 0 < value <= 1."""
    if not 0 < value <= 1:
        raise bad_input(wanted="a fraction above 0 and up to 1", got=f"{value:g}", do="give 1 for all", key=name)


def from_0_to_1(name: str, value: float) -> None:
    """Raise BadInput unless 0 <= value <= 1."""
    if not 0.0 <= value <= 1.0:
        raise bad_input(wanted="a number from 0 to 1", got=str(value), do="give one", key=name)
