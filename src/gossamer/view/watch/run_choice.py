"""The run that `gossamer watch` is asked for: by folder, by name, or the newest one that is under way."""

from __future__ import annotations

import time
from pathlib import Path

from gossamer.spec.errors import bad_input
from gossamer.view.progress import RunProgress
from gossamer.view.run_directory import RunDirectory, latest
from gossamer.view.watch.liveness import state_of

_FILES = ("records.jsonl", "run.yaml", "plan.yaml", "logs", ".lock", "began.json")  # one of them makes it a run's
START = "start one with `gossamer train run.yaml`, or name a run directory"


def choose_run(named: str, runs: Path) -> RunDirectory:
    """Return the run that `named` means; "" and "latest": the newest under `runs` that is under way, or the newest.

    A name is a folder, or one under `runs`, or a part of the name of one run there; of a folder of runs it is the
    newest. Raises BadInput for a folder that is no run's, and where there is none.
    """
    if named in ("", "latest"):
        return _newest(runs)
    for path in (Path(named), runs / named):
        if path.is_dir():
            return _opened(path)
    found = sorted(path for path in _runs(runs) if named in path.name)
    if len(found) == 1:
        return RunDirectory(found[0])
    if found:
        names = ", ".join(path.name for path in found[-3:])
        raise bad_input(wanted=f"the name of one run under {runs}", got=f"{named}, which {len(found)} have in theirs "
                        f"({names})", do="give more of the name")  # fmt: skip
    got = "a file" if Path(named).exists() else "no such folder, and no run of that name"
    raise bad_input(wanted=f"a run directory at {named} or under {runs}", got=got, do=START)


def _opened(path: Path) -> RunDirectory:
    if _is_run(path) or not any(path.iterdir()):  # nothing in it yet: a run that is just being made
        return RunDirectory(path)
    if _runs(path):
        return _newest(path)
    raise bad_input(wanted=f"a run directory at {path}", got="a folder with other things in it", do=START)


def _newest(runs: Path) -> RunDirectory:
    now_s = time.time()
    found = sorted(((_written_s(path), path.name, path) for path in _runs(runs)), reverse=True)
    for _, _, path in found:
        state = state_of(path, RunProgress(), last_s=0.0, now_s=now_s)  # with no records read: who holds the lock
        if state.is_under_way:
            return RunDirectory(path)
    return RunDirectory(found[0][2]) if found else latest(runs)  # which says that there is none


def _runs(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_dir() and _is_run(path)] if folder.is_dir() else []


def _is_run(path: Path) -> bool:
    return any((path / name).exists() for name in _FILES)


def _written_s(path: Path) -> float:
    times = [file.stat().st_mtime for name in _FILES if (file := path / name).exists()]
    return max(times, default=0.0)
