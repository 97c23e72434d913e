"""Run first in a worker: bind its life to its supervisor's, then exec the worker's program.

Run by path with `python -I -S`, hence stdlib only. Arguments: the supervisor's pid, then the program and its own. (A
function run between fork and exec would do the same, but forking a process that has threads may deadlock.)
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    supervisor, *argv = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != int(supervisor):  # it died before we asked to be told
        os._exit(76)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        sys.stderr.write(f"cannot start {argv[0]}: {error.strerror}\n")
        os._exit(127)


if __name__ == "__main__":
    main()
