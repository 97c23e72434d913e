"""The record of a folder of studies: rows of studies that did not run this time stay, with the commit they have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

FIELDS = ("method", "claim", "baseline", "ratio", "paper_ratio", "spread", "seeds", "setting", "holds")
OPTIONAL = ("ratio_without_source",)


def chosen(studies: Iterable[str], papers: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Return the studies ("paper.study") of these papers, and of those the ones that match a pattern; empty: all."""
    mine = [name for name in studies if not papers or name.partition(".")[0] in papers]
    return [name for name in mine if not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)]


def written(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row as it stands in the record: without optional figures that it has not."""
    return {name: value for name, value in row.items() if name not in OPTIONAL or value is not None}


def merged(
    before: Mapping[str, Any], studies: Sequence[str], rows: Mapping[str, list[dict[str, Any]]], why: Mapping[str, str]
) -> dict[str, Any]:
    """Return the new `rows` and `left_out`.

    studies: all there are, in order; rows: of the studies that ran; why: of those that were asked for and did not.
    Left out, by name: every study without any row, and those of `why`, whose earlier rows stay.
    """
    kept: list[dict[str, Any]] = []
    for row in before.get("rows", []):
        name = f"{row['paper']}.{row['study']}"
        if name in studies and name not in rows:
            kept.append(row)
    kept += [row for name in studies for row in rows.get(name, [])]
    kept.sort(key=lambda row: studies.index(f"{row['paper']}.{row['study']}"))
    have = {f"{row['paper']}.{row['study']}" for row in kept}
    old = before.get("left_out", {})
    now = {name: f"{reason}; earlier rows stay" if name in have else reason for name, reason in why.items()}
    waiting = [name for name in studies if name not in rows and (name not in have or name in now or name in old)]
    left_out = {name: now.get(name) or old.get(name) or "was not asked for" for name in waiting}
    return {"rows": kept, "left_out": left_out}
