"""A tiny process that outlives a killed supervisor by just as long as it takes to kill what that left behind.

PR_SET_PDEATHSIG reaches the workers themselves (on Linux); the warden reaches the processes that workers started,
and does so on every system.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

_PROGRAM = Path(__file__).with_name("_orphan_reaper.py")


class OrphanReaper:
    """Guards process groups until `forget`. `close` ends it; what it still guards then is killed."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # out of reach of Ctrl-C and of signals to our group
        )

    def guard(self, group: int) -> None:
        self._tell(f"+{group}\n")

    def forget(self, group: int) -> None:
        self._tell(f"-{group}\n")

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # someone killed the warden: the other two ties still hold
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
