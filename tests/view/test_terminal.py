"""The live display on a real pseudo-terminal, in a process of its own."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[1]
SHOW = """
import sys
sys.path.insert(0, {here!r})
from gossamer.view.open_display import open_display
from view.streams import run
display = open_display(title="test")
for record in run(60, ends=False):
    display.show(record)
{then}
"""


def on_terminal(then: str) -> tuple[int, str]:
    """Exit code and all that a program that shows a run, and then does `then`, writes to its terminal."""
    ours, theirs = pty.openpty()
    environ = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24", "PYTHONIOENCODING": "utf-8"}
    environ = {name: value for name, value in environ.items() if name not in ("CI", "NO_COLOR")}
    program = SHOW.format(here=str(HERE), then=then)
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=theirs, stdout=theirs, stderr=theirs, env=environ, close_fds=True
    )
    os.close(theirs)
    written, deadline = b"", time.monotonic() + 60
    try:
        while time.monotonic() < deadline:
            try:
                block = os.read(ours, 65536)
            except OSError:  # Linux says so when the other side has closed
                break
            if not block:
                break
            written += block
        return process.wait(timeout=10), written.decode("utf-8")
    finally:
        process.kill()
        process.wait()
        os.close(ours)


@pytest.mark.parametrize(
    ("then", "code"),
    [("display.close()", 0), ("pass", 0), ("raise SystemExit(3)", 3), ("raise KeyboardInterrupt", -2)],
)
def test_the_terminal_is_given_back(then: str, code: int) -> None:
    exit_code, written = on_terminal(then)
    assert exit_code == code
    assert "step 60 / 60" in written and "bits/byte" in written
    assert written.count("\x1b[?25l") == written.count("\x1b[?25h") == 1  # cursor hidden, cursor shown
    assert "\x1b[?1049h" not in written  # what stood on the screen before stays there
