"""The run that `gossamer watch` is asked for: by folder, by name, or the newest one that is under way."""

from __future__ import annotations

import time
from pathlib import Path

from gossamer.spec.errors import bad_input
from gossamer.view.progress import RunProgress
from gossamer.view.run_directory import LATEST, RunDirectory, find_run, latest, run_folders
from gossamer.view.watch.liveness import state_of

_FIRST = frozenset(
    {".lock", "began.json", "plan.yaml", "logs"}
)  # what a run may have before its configuration is there
START = "start one with `gossamer train run.yaml`, or name a run directory"


def choose_run(named: str, runs: Path) -> RunDirectory:
    """Return the run that `named` means; "" and "latest": the newest under `runs` that is under way, or the newest.

    A name is found as every command finds it (`find_run`), with `runs` for the folder of runs. A folder of runs means
    the newest one in it, and a folder that is empty so far a run that is just being made. Raises BadInput for a folder
    that is no run's, and where there is none. Of a run in phases it is the phase that has begun last.
    """
    found = _chosen(named, runs)
    return found.phases[-1] if found.phases else found


def _chosen(named: str, runs: Path) -> RunDirectory:
    if named in ("", LATEST):
        return _newest(runs)
    for path in (Path(named), runs / named):
        if path.is_dir():
            return _opened(path)
    path = Path(named)
    return find_run(path if len(path.parts) > 1 or path.exists() else runs / named)


def _opened(path: Path) -> RunDirectory:
    there = {one.name for one in path.iterdir()}
    if {"records.jsonl", "run.yaml"} & there or there <= _FIRST:
        return RunDirectory(path)
    if run_folders(path):
        return _newest(path)
    raise bad_input(wanted=f"a run directory at {path}", got="a folder with other things in it", do=START)


def _newest(runs: Path) -> RunDirectory:
    now_s = time.time()
    for path in run_folders(runs):
        state = state_of(path, RunProgress(), last_s=0.0, now_s=now_s)  # with no records read: who holds the lock
        if state.is_under_way:
            return RunDirectory(path)
    return latest(runs)
