"""Keep a list of process groups, and kill them all when standard input closes: the supervisor is gone.

Run by path with `python -I -S`, hence stdlib only. Lines on standard input: "+PGID" to guard, "-PGID" to forget.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends with its supervisor, not before
    guarded: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line[0] == "+":
            guarded.add(group)
        else:
            guarded.discard(group)
    for group in guarded:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
