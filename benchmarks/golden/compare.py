"""Compares the same run of two commits, item by item."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from golden.artifacts import Artifacts, Items

PARTS = ("metrics", "bytes", "tensors", "plan")


def compare(before: Artifacts | str, after: Artifacts | str) -> dict[str, Any]:
    """Return whether all items are equal, the number of items per part, and the differences.

    before, after: the artifacts of a run, or why it failed.
    """
    if isinstance(before, str) or isinstance(after, str):
        failures = {"before": before, "after": after}
        differences = [f"{role} failed: {why}" for role, why in failures.items() if isinstance(why, str)]
        return {"equal": False, "items": dict.fromkeys(PARTS, 0), "differences": differences}
    old, new = asdict(before), asdict(after)
    differences = [line for part in PARTS for line in _compare_part(part, old[part], new[part])]
    return {"equal": not differences, "items": {part: len(old[part]) for part in PARTS}, "differences": differences}


def _compare_part(part: str, before: Items, after: Items) -> Iterator[str]:
    """Yield one line that names the first difference, if there is one; a plan may gain items."""
    gained = [] if part == "plan" else [name for name in after if name not in before]
    names = [*before, *gained]
    unequal = [name for name in names if _show(before, name) != _show(after, name)]
    if unequal:
        first = unequal[0]
        values = f"{_show(before, first)} before, {_show(after, first)} after"
        yield f"{part}: {len(unequal)} of {len(names)} items differ, first {first}: {values}"


def _show(items: Items, name: str) -> str:
    """Format a value so that equal text means equal bits; nan equals nan."""
    return repr(items[name]) if name in items else "missing"
