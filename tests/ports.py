"""Ports that nobody takes between a test that chose one and the process that listens there."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")  # whose ports a kernel gives to whoever asks for any
_FIRST, _LAST = 10_000, 20_000  # below those that Gossamer derives from a job's number


def free_port() -> int:
    """Return a free port below those that a kernel gives away, so that none is given to another test meanwhile.

    Where a kernel gives all of them away, any that is free now.
    """
    given = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else _LAST
    last = min(given, _LAST)
    for _ in range(100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", random.SystemRandom().randrange(_FIRST, last) if last > _FIRST else 0))
            except OSError:
                continue
            port: int = probe.getsockname()[1]
            return port
    raise RuntimeError(f"no free port in 100 tries between {_FIRST} and {last}")
