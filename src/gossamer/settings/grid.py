"""A grid of configurations: key=value settings of the command line, some with several values.

`train.batch=8,16` has two values; a comma inside brackets, braces or quotes divides nothing, so `a.b=[1,2]` is one
value, and `train.optimizer=adamw,{sgd: {lr: 0.1}}` are two.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

from gossamer.spec.errors import BadInput, bad_input

_OPEN, _CLOSE = "[{(", "]})"


@dataclass(frozen=True, slots=True)
class Axis:
    """One key with the values it takes, as they are written."""

    key: str
    values: tuple[str, ...]

    @staticmethod
    def parse(written: str) -> Axis:
        """Parse key=value,value. Raises BadInput for another form, an empty value, and one that is there twice."""
        key, equals, text = written.partition("=")
        key = key.strip().removeprefix("--")
        if not equals or not all(key.split(".")):
            raise bad_input(
                wanted="key=value,value such as train.batch=8,16",
                got=repr(written),
                do="write the key, =, and its values with commas between them",
            )
        values = tuple(split_values(text))
        if len(values) > 1 and not all(values):
            raise BadInput(f"wanted a value on both sides of every comma, got {text!r}: remove a comma", key=key)
        if twice := [value for n, value in enumerate(values) if value in values[:n]]:
            raise bad_input(wanted="different values", got=f"{twice[0]} twice", do="leave one out", key=key)
        return Axis(key, values)


def split_values(text: str) -> list[str]:
    """Return the parts of a text between its commas, but for those inside brackets, braces or quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        else:
            depth += (letter in _OPEN) - (letter in _CLOSE)
        if letter == "," and depth <= 0 and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


@dataclass(frozen=True, slots=True)
class Grid:
    """The axes of a grid; those of one value are settings of all its points."""

    axes: tuple[Axis, ...]

    @staticmethod
    def parse(written: Iterable[str]) -> Grid:
        """Parse the settings of a grid. Raises BadInput, also for a key that is there twice."""
        axes = tuple(Axis.parse(one) for one in written)
        keys = [axis.key for axis in axes]
        if twice := [key for n, key in enumerate(keys) if key in keys[:n]]:
            raise bad_input(
                wanted="every key once", got=f"{twice[0]} twice", do="write all its values behind one =", key=twice[0]
            )
        return Grid(axes)

    @property
    def varied(self) -> tuple[Axis, ...]:
        """Return the axes with several values."""
        return tuple(axis for axis in self.axes if len(axis.values) > 1)

    def points(self) -> list[tuple[str, ...]]:
        """Return every combination as key=value overrides, one per axis; the last axis changes fastest."""
        return list(product(*[[f"{axis.key}={value}" for value in axis.values] for axis in self.axes]))
