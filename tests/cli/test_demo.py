"""What the demo says of longer runs."""

from __future__ import annotations

import pytest

from gossamer.api import demo

SUMMARY = {"seconds": 80.0, "steps": 800}
MARKS = {"zlib": 2.4, "xz": 2.1}


def test_the_outlook_is_the_first_measured_run_below_each_mark_at_this_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "LONGER", {3200: 2.05, 1600: 2.3})
    said = demo.outlook(SUMMARY, MARKS)
    assert said == (
        "A longer run passes zlib after 1,600 steps, about 2m40s here and xz after 3,200 steps, about 5m20s here."
    )


def test_a_mark_no_run_has_passed_is_not_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "LONGER", {1600: 2.3, 3200: 2.2})
    assert "xz" not in demo.outlook(SUMMARY, MARKS) and "zlib" in demo.outlook(SUMMARY, MARKS)
    monkeypatch.setattr(demo, "LONGER", {})
    assert demo.outlook(SUMMARY, MARKS) == ""
