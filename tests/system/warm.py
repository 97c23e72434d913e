"""`python -m gossamer` as a copy of a process that has imported all that it needs: seconds less for each command.

It is started as ranks are (`gossamer.process.template`), and starts its own ranks likewise. What depends on how an
interpreter starts, and a sample of everything else (failures, Ctrl-C, the run that many tests look at), begins in a
fresh one: `Place.start(..., is_fresh=True)`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from copied import CopiedCommand
from gossamer.process.starter import may_copy
from gossamer.process.template import Template

_PROGRAM = "gossamer.__main__"
_IMPORTS = (
    _PROGRAM,
    "gossamer.cli.train",
    "gossamer.job.worker",
    "transformers.modeling_utils",
    "transformers.models.llama.modeling_llama",
)
_AT_ITS_START = ("PYTHON", "LD_", "OMP_", "MKL_", "GOSSAMER_FRESH")  # variables that are read when a process starts


class _Opened:
    template: Template | None = None


@contextlib.contextmanager
def opened() -> Iterator[None]:
    """While entered, `can_start` says yes."""
    if not may_copy():
        yield
        return
    template = Template(_IMPORTS, env={**os.environ, "OMP_NUM_THREADS": "1"}, log=sys.__stderr__.buffer)
    try:
        while not template.is_ready():
            time.sleep(0.02)
        _Opened.template = template
        yield
    finally:
        _Opened.template = None
        template.close()


def can_start(env: dict[str, str]) -> bool:
    """Whether a command with these variables may be a copy."""
    return _Opened.template is not None and not any(name.startswith(_AT_ITS_START) for name in env)


def command(argv: list[str], *, folder: Path, env: dict[str, str]) -> CopiedCommand:
    """Start `python -m gossamer ARGV` in `folder`, without anything to read."""
    assert _Opened.template is not None
    process = CopiedCommand(_Opened.template, argv, folder=folder, env=env, has_errors=True)
    assert process.stdin is not None
    process.stdin.close()
    process.stdin = None
    return process
