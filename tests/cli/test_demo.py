"""What the demo says of longer runs, and what to type next."""

from __future__ import annotations

import sys
from pathlib import Path

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


def test_who_has_no_gossamer_on_the_path_is_told_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    monkeypatch.setenv("PATH", "")
    monkeypatch.chdir(tmp_path)
    assert demo.activation() == (), "an environment without that script"
    (tmp_path / ".venv" / "bin" / "activate").touch()
    ((command, _),) = demo.activation()
    assert command == "source .venv/bin/activate"
    program = tmp_path / ".venv" / "bin" / "gossamer"
    program.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    assert demo.activation() == ()
