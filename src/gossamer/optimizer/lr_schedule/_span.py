"""Lengths given as a fraction of a run or as a number of steps."""

from __future__ import annotations

from gossamer.spec.errors import bad_input
from gossamer.spec.validate import not_negative


def demand_span(name: str, value: float) -> None:
    """Below 1: a fraction of the run; from 1 on: a whole number of steps."""
    not_negative(name, value)
    if value >= 1 and value != int(value):
        raise bad_input(
            wanted="a fraction below 1, or a whole number of steps",
            got=f"{value:g}",
            do=f"write {round(value)} for that many steps",
            key=name,
        )


def span(name: str, value: float, steps: int) -> int:
    """`value` in steps of a run of `steps`, which must leave at least one step beside it."""
    count = round(value * steps) if value < 1 else int(value)
    if value >= 1 and count >= steps:
        raise bad_input(
            wanted=f"{name} shorter than the run of {steps} steps",
            got=f"{count} steps",
            do=f"lower {name} or raise train.steps",
            key=name,
        )
    return min(count, max(steps - 1, 0))


def rise(step: int, warmup_steps: int) -> float:
    """Equal steps from 1 / (w + 1) at step 0 to 1 at step w: no update is made with a rate of 0."""
    return min(1.0, (step + 1) / (warmup_steps + 1))
