"""The resident memory that a piece of work takes, whichever threads take and free it."""

from __future__ import annotations

import multiprocessing
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

# From 64 KiB on an allocation has pages of its own, which are given back as it is freed; MKL keeps none for later.
_PLAIN_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(64 << 10), "MKL_DISABLE_FAST_MM": "1"}


@contextmanager
def plain_memory() -> Iterator[ProcessPoolExecutor]:
    """Yield a process in which memory that is freed is not resident: the C library reads how at its start."""
    before = {name: os.environ.get(name) for name in _PLAIN_MEMORY}
    os.environ.update(_PLAIN_MEMORY)
    try:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            yield pool
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def resident_peak(work: Callable[[], object]) -> int:
    """Return the most bytes that were resident during `work` above those before it (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _status("VmRSS")
    work()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10
