"""Names of parts of a parameter: the rows [start, stop) of its first dimension, as `wte.weight[0:2048]`.

A plan names them in `buckets`, where one tensor is so large that its parts are encoded, sent and decoded beside each
other. A rule of `plan.exchange` that matches the parameter matches its parts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

_PART = re.compile(r"^(.+)\[(\d+):(\d+)\]$")


@dataclass(frozen=True, slots=True, order=True)
class RowRange:
    """The rows [start, stop) of the parameter `whole`."""

    whole: str
    start: int
    stop: int

    @staticmethod
    def read(name: str) -> RowRange | None:
        """Return the rows that `name` names; None for the name of a whole parameter."""
        found = _PART.match(name)
        return RowRange(found[1], int(found[2]), int(found[3])) if found else None

    @property
    def name(self) -> str:
        """Return the name of the part."""
        return f"{self.whole}[{self.start}:{self.stop}]"


def whole_of(name: str) -> str:
    """Return the parameter that `name` names, or a part of which it names."""
    part = RowRange.read(name)
    return name if part is None else part.whole


def parts_in(buckets: Iterable[Iterable[str]]) -> tuple[str, ...]:
    """Return the names of the parts in the buckets of a plan, in their order."""
    return tuple(name for names in buckets for name in names if RowRange.read(name) is not None)


def parts_of(whole: str, rows: int, count: int) -> tuple[RowRange, ...]:
    """Return at most `count` ranges, as equal as can be, that cover `rows` rows of a parameter."""
    count = max(1, min(rows, count))
    edges = [rows * place // count for place in range(count + 1)]
    return tuple(RowRange(whole, low, high) for low, high in pairwise(edges))
