"""Limits on what a maker can be asked for."""

from __future__ import annotations

from gossamer.spec.errors import bad_input


def at_least_one(**counts: int) -> None:
    """Stages, ranks and micro-batches are counts of something."""
    for name, count in counts.items():
        if count < 1:
            raise bad_input(wanted=f"at least 1 for {name}", got=str(count), do="give a whole number above 0", key=name)
