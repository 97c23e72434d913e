"""Exit codes: four that people and schedulers see, two that a worker tells its supervisor."""

from __future__ import annotations

import signal

DONE = 0
BAD_INPUT = 2  # the user's input cannot work
FAILED = 3  # the run failed
INTERRUPTED = 4  # asked to stop, and a checkpoint is saved
PEER_LOST = 75  # this rank failed only because another one was lost
ORPHANED = 76  # this rank ended itself because its supervisor was gone
SPOKEN = (DONE, BAD_INPUT, INTERRUPTED, PEER_LOST)  # a worker of ours says so before it leaves with one of these


def exit_text(code: int) -> str:
    """-9 -> "signal SIGKILL", 3 -> "exit code 3"."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
