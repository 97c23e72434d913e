"""`python -m gossamer` as a copy of a process that has imported all that it needs: seconds less for each command.

It is started as ranks are (`gossamer.process.template`), and starts its own ranks likewise. What depends on how an
interpreter starts, and a sample of everything else, runs in fresh interpreters (`Place.start(..., is_fresh=True)`).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gossamer.process._template import ForkRequest
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
    if sys.platform != "linux":
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


class WarmCommand(subprocess.Popen[str]):
    """As `subprocess.Popen` of `python -m gossamer ARGV` in `folder`, with pipes for its output."""

    def __init__(self, argv: list[str], *, folder: Path, env: dict[str, str]) -> None:
        self._request = (argv, folder, env)
        super().__init__(["gossamer"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def _execute_child(self, *given: Any) -> None:
        """Fill in `pid` (given: as in Python 3.10 to 3.14, where 12 to 15 are the pipes' ends of output and errors)."""
        argv, folder, env = self._request
        _, out, _, err = given[12:16]
        with open(os.devnull, "rb") as nothing:
            request = ForkRequest(arguments=tuple(argv), env=env, folder=str(folder), descriptors=(0, 1, 2))
            assert _Opened.template is not None
            self.pid = _Opened.template.fork(request, [nothing.fileno(), out, err])
        self._child_created = True
        os.close(out)
        os.close(err)
