"""The validation sets of a run as a configuration names them: a fraction of the training text, and sources by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from gossamer.spec.method_config import Written

HELD_OUT = "validation"  # the name of the set that a bare fraction stands for
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_RESERVED = ("loss",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationNames:
    """The names of the validation sets in the order in which they are evaluated, and where each comes from.

    `fraction`: of the training text that is held out; 0: none. `sources`: of the sets that have one, by name.
    """

    names: tuple[str, ...]
    fraction: float
    sources: Mapping[str, Written]


def sets_of(written: float | Mapping[str, float | Written]) -> ValidationNames:
    """Return the validation sets of `data.validation`."""
    if not isinstance(written, Mapping):
        return ValidationNames(names=(HELD_OUT,) if written else (), fraction=written, sources={})
    fractions = [each for each in written.values() if isinstance(each, (int, float))]
    sources = {name: each for name, each in written.items() if not isinstance(each, (int, float))}
    return ValidationNames(names=tuple(written), fraction=float(fractions[0]) if fractions else 0.0, sources=sources)


def check_sets(written: float | Mapping[str, float | Written]) -> None:
    """Raise ValueError for a fraction outside [0, 1), for names that cannot be shown, and for two fractions."""
    if not isinstance(written, Mapping):
        _check_fraction(written, least=0.0)
        return
    if not written:
        raise ValueError("wanted validation sets by name, got none: write 0 for a run without validation")
    for name in written:
        if not _NAME.fullmatch(name) or name in _RESERVED:
            raise ValueError(
                f"wanted names of letters, digits, - and _ other than {_RESERVED[0]}, got {name!r}: rename the set"
            )
    fractions = [name for name, each in written.items() if isinstance(each, (int, float))]
    if len(fractions) > 1:
        raise ValueError(
            f"wanted one fraction of the training text, got {' and '.join(fractions)}: give the others a source"
        )
    for name in fractions:
        _check_fraction(float(written[name]), least=1e-12)  # type: ignore[arg-type]


def _check_fraction(value: float, *, least: float) -> None:
    if not least <= value < 1:
        sign = ">=" if least == 0 else ">"
        raise ValueError(
            f"wanted a fraction of the training text {sign} 0 and < 1, or validation sets such as {{books: "
            f'"text:books/*.txt"}}, got {value:g}: write such a fraction, or sources by name'
        )
