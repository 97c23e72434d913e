"""Detect that the kernel killed a process for lack of memory: counters of its control group (cgroup v2 or v1)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class MemoryEvents:
    """The out-of-memory counter of the control group of one process, at one time."""

    file: Path | None  # holds the line "oom_kill N"; None where there is no such group
    limit_bytes: int | None
    kills: int

    def killed_since(self) -> int:
        """Return how many processes of the group the kernel has killed for lack of memory since then."""
        return _kills(self.file) - self.kills


def memory_events(pid: int) -> MemoryEvents:
    """Return the counter and memory limit of the control group that process `pid` is in now."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text("utf-8").splitlines()
    except OSError:
        return MemoryEvents(None, None, 0)
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            found = _events(_ROOT / path.lstrip("/"), "memory.events", "memory.max")
        elif "memory" in controllers.split(","):
            found = _events(_ROOT / "memory" / path.lstrip("/"), "memory.oom_control", "memory.limit_in_bytes")
        else:
            continue
        if found is not None:
            return found
    return MemoryEvents(None, None, 0)


def _events(folder: Path, events: str, limit: str) -> MemoryEvents | None:
    file = folder / events
    if not file.exists():
        return None
    try:
        text = (folder / limit).read_text("ascii").strip()
    except OSError:
        text = "max"
    most = int(text) if text.isdigit() and int(text) < 1 << 60 else None
    return MemoryEvents(file, most, _kills(file))


def _kills(file: Path | None) -> int:
    try:
        lines = file.read_text("ascii").splitlines() if file is not None else []
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
