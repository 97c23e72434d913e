"""A small process that outlives a killed supervisor just long enough to kill the processes it had started.

PR_SET_PDEATHSIG reaches the workers themselves (on Linux); the reaper reaches the processes that workers started, on
every system.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

_END_S = 5.0  # for the reaper to kill what it still guards
_PROGRAM = Path(__file__).with_name("_orphan_reaper.py")


class OrphanReaper:
    """A reaper process that guards process groups until `forget`. `close` ends it; it kills groups it still guards."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # out of reach of Ctrl-C and of signals to our group
        )

    def guard(self, group: int) -> None:
        """Kill process group `group` when this supervisor ends before `forget`."""
        self._tell(f"+{group}\n")

    def forget(self, group: int) -> None:
        """Stop guarding process group `group`."""
        self._tell(f"-{group}\n")

    def close(self) -> None:
        """End the reaper and wait for it; it kills the groups that it still guards."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:  # somebody has stopped it
            self._process.kill()
            self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the reaper was killed: heartbeats still end workers
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
