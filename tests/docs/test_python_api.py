"""The page of the public module: complete, and what it says of errors is so. That it is fresh, tests/cli checks."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import gossamer
from gossamer.spec import errors

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "reference" / "python_api.md").read_text("utf-8")


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """docs/python_api.py, which writes the page."""
    monkeypatch.syspath_prepend(str(DOCS))
    monkeypatch.delitem(sys.modules, "python_api", raising=False)
    import python_api

    return python_api


def test_every_public_name_has_a_section() -> None:
    heads = [head.replace("\\", "") for head in re.findall(r"^## gossamer\.(.+)$", PAGE, re.M)]
    assert sorted(heads) == sorted(gossamer.__all__)


def test_every_function_says_which_errors_it_raises(writer: ModuleType) -> None:
    for name in writer.FUNCTIONS:
        found = writer.raised(inspect.getdoc(writer._home(name)))
        assert found, name
        assert all(issubclass(getattr(errors, one), Exception) for one in found), (name, found)


def test_a_function_that_says_no_error_stops_the_page(writer: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def rank() -> int:
        """Return a number."""
        return 0

    monkeypatch.setattr(writer, "_home", lambda name: rank)
    with pytest.raises(ValueError, match=r"gossamer\.train does not say what it raises"):
        writer.page()


def test_a_new_public_name_without_a_section_stops_the_page(
    writer: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gossamer, "__all__", [*gossamer.__all__, "tell"])
    with pytest.raises(ValueError, match="tell"):
        writer.page()


@pytest.mark.parametrize(
    ("docstring", "wanted"),
    [
        ("Return x.", []),
        ("Return x. Raises BadInput.", ["BadInput"]),
        ("Return x.\n\nRaises BadInput (if\nit is, or not), NoPlan.", ["BadInput", "NoPlan"]),
        ("Raises BadInput for a target that exists.", ["BadInput"]),
    ],
)
def test_errors_are_read_from_a_docstring(docstring: str, wanted: list[str], writer: ModuleType) -> None:
    assert writer.raised(docstring) == wanted
