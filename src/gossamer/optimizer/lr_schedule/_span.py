"""Lengths given as a fraction of a run or as a number of steps."""

from __future__ import annotations

from gossamer.spec.errors import bad_input
from gossamer.spec.validate import not_negative


def demand_span(name: str, value: float) -> None:
    """Raise BadInput unless `value` is a fraction of the run (below 1) or a whole number of steps."""
    not_negative(name, value)
    if value >= 1 and value != int(value):
        raise bad_input(
            wanted="a fraction below 1, or a whole number of steps",
            got=f"{value:g}",
            do=f"write {round(value)} for {round(value)} steps, or a fraction below 1",
            key=name,
        )


def span(name: str, value: float, steps: int) -> int:
    """Return `value` in steps; at least one of the run's `steps` must remain beside it. Raise BadInput otherwise."""
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
    """Return the warm-up factor: linear from 1 / (w + 1) at step 0 to 1 at step w, so that no update has rate 0."""
    return min(1.0, (step + 1) / (warmup_steps + 1))
