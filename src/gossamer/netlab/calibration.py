"""Measure the cores that every host really gets, on all of them at the same time."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from gossamer.netlab import cpu_burn
from gossamer.netlab.hosts import follow, stop
from gossamer.spec.errors import RunFailed

_WARM_UP_S, _SPIN_S = 0.6, 1.0  # for an interpreter to start under a small quota; 200 quota periods


def real_cores(
    granted: Sequence[float], spawn: Callable[[int, Sequence[str]], subprocess.Popen[bytes]]
) -> tuple[float, ...]:
    """Return the cores per host while every host spins.

    `spawn` starts a command on a host, with a pipe for its output. Raises RunFailed when a host's measurement fails.
    """
    start = time.monotonic() + _WARM_UP_S
    argv = [sys.executable, "-I", cpu_burn.__file__, str(start), str(start + _SPIN_S)]
    said: dict[int, str] = {}
    started: list[subprocess.Popen[bytes]] = []
    try:
        for host, cores in enumerate(granted):
            started.append(spawn(host, [*argv, str(math.ceil(cores))]))
        codes = follow(started, output=said.__setitem__)
    finally:
        stop(started)
    if any(codes):
        raise RunFailed(f"laboratory: calibration ended with exit codes {codes}, saying {said}")
    return tuple(float(said[host]) for host in range(len(granted)))
