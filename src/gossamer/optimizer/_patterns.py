"""Regular expressions of parameter names in settings: checked when they are written, and when the names are known."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from gossamer.spec.errors import BadInput
from gossamer.spec.suggest import nearest


def check_patterns(patterns: Iterable[str], key: str) -> None:
    """Raise BadInput for what is no regular expression."""
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise BadInput(f"{pattern!r} is no regular expression: {error}", key=key) from None


def check_found(patterns: Iterable[str], names: Collection[str], key: str) -> None:
    """Raise BadInput for a pattern that is in none of the names of trained parameters, with the nearest of these."""
    for pattern in patterns:
        if not any(re.search(pattern, name) for name in names):
            said = f"no trained parameter has {pattern!r} in its name: {nearest(pattern, list(names))}"
            raise BadInput(said, key=key)
