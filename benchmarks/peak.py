"""The largest resident memory of a process (Linux), for benchmarks whose runs are processes."""

from __future__ import annotations

import re
from pathlib import Path


def resident_peak_bytes(pid: int | str = "self") -> int:
    """Return the most bytes of the process that were resident since its program began.

    Not `ru_maxrss`: a process that is started begins with that of the one which starts it, so a run of a few hundred
    MB after one of 4.6 GB was said to take 4.6 GB.
    """
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) << 10
