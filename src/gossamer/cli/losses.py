"""What the commands that make a smaller model of a trained one share: checked numbers, and losses before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gossamer.cli.output import table
from gossamer.spec.errors import bad_input
from gossamer.view.screen import Screen


def check_counts(*, calibration: int, sequences: int, sequence: int | None) -> None:
    """Raise BadInput for sequences to calibrate with or to measure, or tokens of one, that are too few."""
    least = {"calibration": (calibration, 1), "sequences": (sequences, 1), "sequence": (sequence, 2)}
    for name, (value, low) in least.items():
        if value is not None and value < low:
            raise bad_input(wanted=f"a number >= {low}", got=str(value), do=f"give {low} or more", key=f"--{name}")


def losses_told(texts: Sequence[Mapping[str, Any]], *, name_files: str) -> str:
    """Return the losses on each text before and after as a table. `name_files`: what to do where there is no text."""
    if not texts:
        return f"no text: the loss was not measured ({name_files})"
    rows: list[Sequence[str]] = [("text", "loss before", "after", "difference", "sequences")]
    return table([*rows, *map(_row, texts)], screen=Screen.of())


def _row(one: Mapping[str, Any]) -> tuple[str, ...]:
    before, after = one["loss_before"], one["loss_after"]
    return (one["text"], f"{before:.5f}", f"{after:.5f}", f"{after - before:+.5f}", str(one["sequences"]))
