"""The state file of an emulated network, written before anything is created, and the removal of all that it names.

Its owner removes the network however it ends; a cleanup process does so when the owner was killed, and the next `lab
up` or `lab down` when that process was killed too. Standard library only: the cleanup process runs this file by path
(cleanup.py PREFIX), without the owner's modules, and has no time to import any.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

_NAMESPACES = Path("/run/netns")
_GIVE_UP_S = 10.0


def folder() -> Path:
    """Return the folder of the state files."""
    run = Path("/run")
    return (run if run.is_dir() else Path(tempfile.gettempdir())) / "gossamer-lab"


def claim(cgroup_roots: Iterable[str]) -> str:
    """Return a new prefix; its state file names the owner and everything that will be created."""
    folder().mkdir(mode=0o755, exist_ok=True)
    roots, pid = list(cgroup_roots), os.getpid()
    for number in range(10_000):
        prefix = f"gsm{pid}x{number}"
        state = {"prefix": prefix, "pid": pid, "started": started(pid), "cgroups": [f"{r}/{prefix}" for r in roots]}
        beside = folder() / f".{prefix}.{threading.get_native_id()}"  # several threads may make one at a time
        beside.write_text(json.dumps(state), "utf-8")
        try:
            os.link(beside, folder() / f"{prefix}.json")  # fails where the name is taken; never half a file
        except FileExistsError:
            continue
        finally:
            beside.unlink()
        return prefix
    raise AssertionError("ten thousand laboratories in one process")


def standing() -> tuple[str, ...]:
    """Return the prefixes of all emulated networks that have a state file."""
    return tuple(sorted(path.stem for path in folder().glob("gsm*.json")))


def sweep() -> tuple[str, ...]:
    """Remove every emulated network whose owner is dead; return their prefixes."""
    dead = tuple(prefix for prefix in standing() if not _owner_lives(_state(prefix)))
    for prefix in dead:
        remove(prefix)
    for probe in _NAMESPACES.glob("gsm*probe"):  # a trial of `lab_unavailable` that was killed in the middle
        if not started(int(re.sub(r"\D", "", probe.name) or "0")):
            subprocess.run(["ip", "netns", "del", probe.name], capture_output=True, check=False)
    return dead


def remove(prefix: str) -> None:
    """Kill the processes of an emulated network and delete its namespaces, cgroups and state file. Safe to repeat."""
    state = _state(prefix)
    cgroups = [Path(path) for path in state.get("cgroups", ())]
    namespaces = _namespaces(prefix)
    _end_processes(namespaces, cgroups)
    for namespace in namespaces:
        subprocess.run(["ip", "netns", "del", namespace.name], capture_output=True, check=False)
    for cgroup in cgroups:
        _remove_cgroup(cgroup)
    (folder() / f"{prefix}.json").unlink(missing_ok=True)


def end(prefix: str) -> None:
    """Ask the owner of an emulated network to end (SIGTERM), and remove the network if it does not within 10 s."""
    state, until = _state(prefix), time.monotonic() + _GIVE_UP_S
    if _owner_lives(state):
        os.kill(state["pid"], signal.SIGTERM)
    while prefix in standing() and time.monotonic() < until:
        time.sleep(0.02)
    remove(prefix)


def started(pid: int) -> int:
    """Return when a process started, in clock ticks since boot, 0 where there is none.

    The time tells the process from a later one with the same pid.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace")
    except OSError:
        return 0
    fields = stat.rpartition(")")[2].split()
    return 0 if fields[0] in "ZX" else int(fields[19])


def _owner_lives(state: dict[str, Any]) -> bool:
    pid = state.get("pid")
    return isinstance(pid, int) and started(pid) == state.get("started")


def _state(prefix: str) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        state = json.loads((folder() / f"{prefix}.json").read_text("utf-8"))
        if isinstance(state, dict):
            return state
    return {}


def _namespaces(prefix: str) -> list[Path]:
    ours = re.compile(re.escape(prefix) + r"(sw|h\d+)")
    return [path for path in _NAMESPACES.glob(f"{prefix}*") if ours.fullmatch(path.name)]


def _end_processes(namespaces: list[Path], cgroups: list[Path]) -> None:
    until = time.monotonic() + _GIVE_UP_S
    while (pids := {*_in_namespaces(namespaces), *_in_cgroups(cgroups)}) and time.monotonic() < until:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _in_namespaces(namespaces: list[Path]) -> Iterator[int]:
    wanted = set()
    for namespace in namespaces:
        with contextlib.suppress(OSError):
            wanted.add(_identity(namespace))
    for entry in os.scandir("/proc") if wanted else ():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if _identity(Path(entry.path, "ns/net")) in wanted:
                    yield int(entry.name)


def _identity(path: Path) -> tuple[int, int]:
    about = path.stat()
    return about.st_dev, about.st_ino


def _in_cgroups(cgroups: list[Path]) -> Iterator[int]:
    for cgroup in [part for top in cgroups for part in _parts(top)]:
        with contextlib.suppress(OSError):
            yield from (int(pid) for pid in (cgroup / "cgroup.procs").read_text("ascii").split() if started(int(pid)))


def _remove_cgroup(cgroup: Path) -> None:
    until = time.monotonic() + _GIVE_UP_S
    while cgroup.exists() and time.monotonic() < until:
        for path in _parts(cgroup):
            with contextlib.suppress(OSError):  # the kernel has not let go of the last process yet
                path.rmdir()
        if cgroup.exists():
            time.sleep(0.01)


def _parts(cgroup: Path) -> list[Path]:
    """The cgroups of the hosts, then the one they are in; another process may be removing them meanwhile."""
    with contextlib.suppress(OSError):
        return [*(Path(entry.path) for entry in os.scandir(cgroup) if entry.is_dir()), cgroup]
    return []


def guard(prefix: str) -> None:
    """Wait for the owner's end, then remove what remains. An owner that has cleaned up ends this process itself."""
    state = _state(prefix)
    pid = state.get("pid")
    if isinstance(pid, int) and _owner_lives(state):
        with contextlib.suppress(ProcessLookupError):
            watched = os.pidfd_open(pid)
            if _owner_lives(state):
                select.select([watched], [], [])
    remove(prefix)


if __name__ == "__main__":
    guard(sys.argv[1])
