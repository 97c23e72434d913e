"""Claims about time. A paper is a module with `rows(*, quick: bool) -> list[Row]`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Row:
    """One claim: what is said, the paper's figure, ours in the same unit, and what both were measured on."""

    claim: str
    published: float
    ours: float
    setting: str
    details: dict[str, Any] = field(default_factory=dict)
