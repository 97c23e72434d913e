"""The run of the demo: `gossamer demo` trains, reloads what it has trained, and compares it with simple statistics."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import yaml

from gossamer.api.started_run import train_command
from gossamer.settings import Resolved

_LEFT = Path("run.yaml")
_HEAD = """# The run that `gossamer demo` made. Change it into yours: model (hf, gguf or factory), text, steps.
# `gossamer config schema` lists all keys, docs/tutorials/first_model.md goes through them.
"""


def demo_command(*, seconds: float | None = None, model: str = "auto") -> dict[str, Any]:
    """Run `gossamer demo`: train on the source of Python's own library, reload, sample, compare; return the summary.

    `model`: smollm2 (its wheel must be installed), llama, or auto: the first where it can be had.
    """
    from rich.console import Console

    from gossamer.api.demo import Demo, closing
    from gossamer.view.end_summary import demo_panel

    demo, console = Demo.of(model, seconds), Console()
    for line in demo.promise():
        Console(stderr=True).print(line, highlight=False)
    config = demo.config()
    summary = train_command(Resolved.of(config, origin="gossamer demo"))
    run_dir = Path(summary["directory"])
    said = "Now it writes a sample, and zlib, xz and byte counts are measured on the same text."
    Console(stderr=True).print(said, highlight=False)
    from gossamer.job.trained_run import read_trained
    from gossamer.job.training_data import corpus_of
    from gossamer.model.generate import generate

    found, corpus = read_trained(run_dir), corpus_of(config.data)
    text = generate(
        found.module, found.words(), demo.prompt, tokens=demo.sample_tokens, temperature=0.7, top_k=40, seed=0
    )
    left = leave_configuration(demo.written(), _LEFT)
    result = closing(
        summary,
        text=text,
        train=corpus.text("train"),
        validation=corpus.text("validation"),
        program=program_name(),
        configuration=left or run_dir / "run.yaml",
        prompt=demo.prompt,
    )
    console.print(demo_panel(result, width=min(100, console.width)))
    return {**summary, "sample": demo.prompt + text}


def leave_configuration(written: dict[str, Any], file: Path) -> Path | None:
    """Write the demo's configuration for people to change; None where there is such a file already, or no room."""
    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(_HEAD + yaml.safe_dump(written, sort_keys=False, width=100))
    except OSError:
        return None
    return file


def program_name() -> str:
    """Return how this command is written in the user's shell: `gossamer`, or the path of it that was called."""
    called = Path(sys.argv[0])
    if called.name == "__main__.py":
        return f"{_short(Path(sys.executable))} -m gossamer"
    if called.name != "gossamer" or not called.is_file():  # from Python, or a test
        return "gossamer"
    found = shutil.which("gossamer")
    return "gossamer" if found and Path(found).samefile(called) else _short(called)


def _short(path: Path) -> str:
    """Return the shorter of a path and the same from the current folder on."""
    beside = os.path.relpath(path)
    return beside if len(beside) < len(str(path)) else str(path)
