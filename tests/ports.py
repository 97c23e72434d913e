"""Ports that nobody takes between a test that chose one and the process that listens there."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")  # whose ports a kernel gives to whoever asks for any


def free_port() -> int:
    """Return a free port below those that a kernel gives away; no kernel of another test takes it meanwhile."""
    least = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else 32768
    for _ in range(100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", random.SystemRandom().randrange(10_000, least)))
            except OSError:
                continue
            port: int = probe.getsockname()[1]
            return port
    raise RuntimeError(f"no free port in 100 tries between 10000 and {least}")
