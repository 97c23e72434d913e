"""What the kernel counts for a host."""

from __future__ import annotations

import time
from typing import Any


def counted() -> dict[str, Any]:
    """So far: bytes sent, payload and headers, and processor seconds of this process."""
    with open("/proc/net/dev") as table:
        sent = sum(int(line.split(":")[1].split()[8]) for line in table if line.strip().startswith("eth0:"))
    return {"interface_bytes": sent, "cpu_s": time.process_time()}
