"""Run the system's network tools (ip, tc, bridge), many lines at a time."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from typing import Any

from gossamer.spec.errors import RunFailed


def tool(*argv: str, lines: Sequence[str] = ()) -> str:
    """Run `argv` with `lines` as its input and return its output; raises RunFailed with the tool's own message."""
    done = subprocess.run(argv, input="\n".join([*lines, ""]), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
        raise RunFailed(f"laboratory: `{' '.join(argv)}` failed: {said}{_culprit(said, lines)}")
    return done.stdout


def batch(program: str, namespace: str, lines: Sequence[str]) -> None:
    """Give `lines` to ip, tc or bridge in one namespace, in one process."""
    if lines:
        tool(program, "-n", namespace, "-batch", "-", lines=lines)


def read_json(*argv: str) -> list[dict[str, Any]]:
    """Return the JSON list that ip or tc prints."""
    answer: list[dict[str, Any]] = json.loads(tool(*argv) or "[]")
    return answer


def _culprit(said: str, lines: Sequence[str]) -> str:
    number = said.rpartition("Command failed -:")[2].split()[0:1]
    return f" (in: {lines[int(number[0]) - 1]})" if lines and number and number[0].isdigit() else ""
