"""Measure the cores that a host really gets: run by path on every host at the same time.

cpu_burn.py START_S END_S PROCESSES keeps PROCESSES busy between two readings of the monotonic clock, and writes the
cores it had.
"""

from __future__ import annotations

import os
import resource
import sys
import time


def spin(start_s: float, end_s: float) -> float:
    """Return the cores that this process had between the two clock readings (from now, when it starts late)."""
    time.sleep(max(0.0, start_s - time.monotonic()))
    wall, cpu = time.monotonic(), time.process_time()
    while time.monotonic() < end_s:
        sum(range(100))
    return (time.process_time() - cpu) / (time.monotonic() - wall)


def main() -> None:
    """Spin in PROCESSES processes and write the sum of their cores."""
    start_s, end_s, processes = float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    children = []
    for _ in range(processes - 1):
        child = os.fork()
        if child == 0:
            spin(start_s, end_s)
            os._exit(0)
        children.append(child)
    own = spin(start_s, end_s)
    for child in children:
        os.waitpid(child, 0)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    sys.stdout.write(f"{own + (used.ru_utime + used.ru_stime) / (end_s - start_s):.4f}\n")


if __name__ == "__main__":
    main()
