"""Exit codes: four for users and schedulers, two between a worker and its supervisor."""

from __future__ import annotations

import signal

DONE = 0
BAD_INPUT = 2  # the user's input is invalid
FAILED = 3  # the run failed
INTERRUPTED = 4  # asked to stop, and a checkpoint is saved
PEER_LOST = 75  # this rank failed only because another one was lost
ORPHANED = 76  # this rank ended itself because its supervisor was gone
SPOKEN = (DONE, BAD_INPUT, INTERRUPTED, PEER_LOST)  # our workers record one of these before they exit with it


def exit_text(code: int) -> str:
    """Return an exit code in words: -9 gives "signal SIGKILL", 3 gives "exit code 3"."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
