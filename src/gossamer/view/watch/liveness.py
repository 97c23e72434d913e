"""Whether a run is under way, read from its directory: the records and who holds the lock. Takes no lock itself."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from gossamer.spec.units import show_seconds
from gossamer.view.progress import RunProgress

SILENT_S = 600.0  # without a record, after which a run whose process cannot be seen is no longer called running
ENDING_S = 10.0  # between a process's last record and its end
CLOCK_S = 5.0  # by which two ways to tell a time may differ
RUNNING = ("starting", "running")


@dataclass(frozen=True, slots=True)
class RunState:
    """The state of a run in one word, and why it is said to be in it.

    `word`: "empty" | "starting" | "running" | "silent" (it may run on another host) | "crashed" (its process ended, no
    end was recorded) | "gone" (the folder was removed) | the outcome of its end: "done" | "interrupted" | "failed".
    """

    word: str
    why: str = ""

    @property
    def is_under_way(self) -> bool:
        return self.word in RUNNING


def state_of(directory: Path, progress: RunProgress, *, last_s: float, now_s: float) -> RunState:
    """Return the state of the run in `directory`, of which `progress` was read.

    `last_s` is the time of its last record (0: none), `now_s` the present one, in seconds since the epoch.
    """
    if not directory.is_dir():
        return RunState("gone", "its folder is not there any more")
    holder = _holder(directory)
    if progress.end is not None and not (holder is not None and holder.is_after(progress.end.time_s)):
        return RunState(progress.end.outcome, progress.end.message)
    if holder is None:
        is_empty = progress.start is None and not (directory / "run.yaml").exists()
        return RunState("empty", "no process has written to it yet") if is_empty else _without_holder(last_s, now_s)
    if holder.is_alive is None:
        if last_s and now_s - last_s < SILENT_S:
            return RunState("running", holder.words)
        return RunState("silent", f"{holder.words}, which cannot be seen from here")
    if not holder.is_alive:
        return RunState("crashed", f"{holder.words} is gone, and no end was recorded")
    has_begun = progress.start is not None and not holder.is_after(progress.start.time_s)
    return RunState("running" if has_begun else "starting", holder.words)


def _without_holder(last_s: float, now_s: float) -> RunState:
    """Return the state of a run that began, has no end, and that no process holds: one that just ends, or a crash."""
    silent_s = now_s - last_s
    if last_s and silent_s < ENDING_S:
        return RunState("running", "its process is about to end")
    since = f" for {show_seconds(round(silent_s))}" if last_s else ""
    return RunState("crashed", f"no process holds it, and it has recorded nothing{since}")


@dataclass(frozen=True, slots=True)
class _Holder:
    """The process that the lock of a run directory names. `is_alive`: None for one of another host."""

    host: str
    process: int
    since_s: float
    is_alive: bool | None

    @property
    def words(self) -> str:
        return f"process {self.process} on host {self.host}"

    def is_after(self, time_s: float) -> bool:
        """Return whether it took the lock after a record of `time_s`, which is then of an earlier start."""
        return self.is_alive is not False and self.since_s > time_s


def _holder(directory: Path) -> _Holder | None:
    """Read who holds the lock (view/run_lock.py). The lock itself is not touched: trying it would refuse a trainer."""
    for name in (".lock", ".lock.beat"):
        try:
            said = json.loads((directory / name).read_text("utf-8"))
            host, process, since_s = str(said["host"]), int(said["process"]), float(said["since_s"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        return _Holder(host, process, since_s, _is_alive(process, since_s) if host == socket.gethostname() else None)
    return None


def _is_alive(process: int, since_s: float) -> bool:
    """Return whether this process is there, and not a later one that got its number."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        pass
    began_s = _began_s(process)
    return began_s is None or began_s <= since_s + CLOCK_S


def _began_s(process: int) -> float | None:
    """Return when a process began, in seconds since the epoch; None where the system does not say (only Linux does)."""
    try:
        ticks = int(Path(f"/proc/{process}/stat").read_text("utf-8").rpartition(")")[2].split()[19])
        since_boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    except (OSError, ValueError, IndexError, AttributeError):
        return None
    return time.time() - (since_boot_s - ticks / os.sysconf("SC_CLK_TCK"))
