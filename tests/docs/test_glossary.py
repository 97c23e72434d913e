"""The glossary against the source: each key, class and package that it names exists."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from gossamer.settings.catalog import categories
from gossamer.settings.describe import leaves

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "reference" / "glossary.md"
COLUMNS = ["Term", "Meaning", "Config key", "Class or function", "Package or module"]


def tables() -> Iterator[list[list[str]]]:
    """The rows of every table, its head included."""
    for section in re.split(r"^## .+$", PAGE.read_text("utf-8"), flags=re.M)[1:]:
        lines = [line for line in section.splitlines() if line.startswith("|")]
        yield [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


ROWS = [row for table in tables() for row in table[2:]]


def named(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_section_has_one_table_of_the_same_columns() -> None:
    found = list(tables())
    assert found and all(table[0] == COLUMNS and len(table) > 2 for table in found)
    assert all(len(row) == len(COLUMNS) for row in ROWS)
    terms = [row[0] for row in ROWS]
    assert len(set(terms)) == len(terms), "one row for each term"


KNOWN = categories()
KEYS = frozenset(key for key, _ in leaves())
OPTIONS = frozenset(re.findall(r"`(--[a-z-]+)`", (DOCS / "reference" / "commands.md").read_text("utf-8")))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_keys_of_a_term_exist(row: list[str]) -> None:
    for key in named(row[2]):
        if key.startswith("--"):
            assert key in OPTIONS
        elif "/" in key:
            place, _, field = key.rpartition(".")
            category, _, method = place.rpartition("/")
            assert field in [p.name for p in KNOWN[category].method(method).parameters], key
        else:
            assert key in KEYS, key
    assert named(row[2]) or row[2] == "-"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_classes_and_packages_of_a_term_exist(row: list[str]) -> None:
    modules = [importlib.import_module(name) for name in named(row[4])]
    assert modules
    for name in named(row[3]):
        assert any(hasattr(module, name) for module in modules), f"{name} is in none of {named(row[4])}"
    assert named(row[3]) or row[3] == "-"
