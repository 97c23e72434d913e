"""The cores and memory that this process may use, under a container's limits if there are any, and has used."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def cores() -> tuple[float, str]:
    """Return the number of usable cores, and the limit that makes them fewer than the machine has ("" if none does)."""
    present = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else present
    quota = _quota()
    if quota is not None and quota < allowed:
        return round(quota, 2), f" of {present}, by the container's quota"
    return float(allowed), f" of {present}, by affinity" if allowed < present else ""


def memory() -> tuple[int, int]:
    """Return the total and the free bytes of memory, both under the container's limit.

    Pages of files that nobody has touched lately count as free: the kernel drops them first.
    """
    page = os.sysconf("SC_PAGE_SIZE")
    total = page * os.sysconf("SC_PHYS_PAGES")
    free = _meminfo("MemAvailable") or total
    limit = _number(_CGROUP / "memory.max") or _number(_CGROUP / "memory/memory.limit_in_bytes")
    used = _number(_CGROUP / "memory.current") or _number(_CGROUP / "memory/memory.usage_in_bytes") or 0
    if limit is None or limit >= total:
        return total, free
    return limit, min(free, max(0, limit - used + _idle_files()))


def _idle_files() -> int:
    """Return the bytes of idle file pages in the container."""
    for path, name in (
        (_CGROUP / "memory.stat", "inactive_file"),
        (_CGROUP / "memory/memory.stat", "total_inactive_file"),
    ):
        for line in _text(path).splitlines():
            if line.startswith(f"{name} "):
                return int(line.split()[1])
    return 0


def _quota() -> float | None:
    """Return the cores that the cgroup allows (v2's cpu.max, else v1's quota / period); None without a limit."""
    text = _text(_CGROUP / "cpu.max").split()
    if len(text) == 2 and text[0].isdigit():
        return int(text[0]) / int(text[1])
    quota, period = _number(_CGROUP / "cpu/cpu.cfs_quota_us"), _number(_CGROUP / "cpu/cpu.cfs_period_us")
    return quota / period if quota and period else None


def _meminfo(name: str) -> int | None:
    for line in _text(Path("/proc/meminfo")).splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text("ascii")
    except OSError:
        return ""


def peak_bytes() -> int:
    """Return the largest resident memory of this process so far, in bytes.

    From `/proc`, where there is one: in `ru_maxrss` a new process has the peak of the one that started it.
    """
    if (told := _status("VmHWM")) is not None:
        return told
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def resident_bytes() -> tuple[int, int]:
    """Return the memory of this process now: its own bytes, and those of files that processes share (libraries).

    Where the system does not tell them apart, all of it is its own.
    """
    own, shared = _status("RssAnon"), _status("RssFile")
    return (own, shared) if own is not None and shared is not None else (peak_bytes(), 0)


def _status(name: str) -> int | None:
    for line in _text(Path("/proc/self/status")).splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None
