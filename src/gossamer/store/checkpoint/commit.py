"""The directory protocol of checkpoints: folder names, their visibility, and the atomic commit."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gossamer.spec.errors import RunFailed, bad_input

_COMMITTED = re.compile(r"step-(\d{8,})(\.replaced)?")
_PARTIAL = re.compile(r"step-(\d{8,})(\..+)?\.partial")


def step_folder(directory: Path, step: int) -> Path:
    """Return the folder of the committed checkpoint of `step`."""
    return directory / f"step-{step:08d}"


def partial_folder(directory: Path, step: int, token: str) -> Path:
    """Return the folder in which ranks gather the parts of the checkpoint of `step` before the commit."""
    return directory / (f"step-{step:08d}.{token}.partial" if token else f"step-{step:08d}.partial")


def list_checkpoints(directory: Path | str) -> tuple[int, ...]:
    """Return the steps of the committed checkpoints, newest first; none where the directory is missing."""
    return tuple(sorted({step for step, _ in _committed(Path(directory))}, reverse=True))


def latest_step(directory: Path | str) -> int | None:
    """Return the newest committed step, not verified; None where there is none."""
    return next(iter(list_checkpoints(directory)), None)


def locate(directory: Path, step: int) -> Path | None:
    """Return the folder of a committed step, or None; while a new save replaces it, the old folder counts."""
    folder = step_folder(directory, step)
    old = folder.with_name(folder.name + ".replaced")
    return folder if folder.is_dir() else old if old.is_dir() else None


def _committed(directory: Path) -> Iterator[tuple[int, Path]]:
    for path in _entries(directory):
        if (match := _COMMITTED.fullmatch(path.name)) and path.is_dir():
            yield int(match.group(1)), path


def _entries(directory: Path) -> list[Path]:
    return sorted(directory.iterdir()) if directory.is_dir() else []


def prepare(directory: Path) -> None:
    """Make the checkpoint directory; raises BadInput where that cannot be."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise bad_input(
            wanted="a directory for checkpoints",
            got=f"{directory} ({error.strerror})",
            do="make its folder writable, or choose another",
        ) from None


def sweep(directory: Path, below: int | None = None) -> None:
    """Remove partial folders: all (by the leader, before any rank of its start saves), or those of steps below `below`.

    It also removes a replaced checkpoint, or puts it back where the new one of its step is missing.
    """
    for path in _entries(directory):
        match = _PARTIAL.fullmatch(path.name)
        if match is not None and (below is None or int(match.group(1)) < below):
            discard(path)
    for _, path in list(_committed(directory)):
        if path.suffix == ".replaced":
            whole = path.with_suffix("")
            with suppress(
                OSError
            ):  # tidying never fails a save: it is tried again at the next, and `locate` knows both
                discard(path) if whole.is_dir() else path.rename(whole)


def discard(folder: Path) -> None:
    """Remove a folder that others may still write into: renamed first, so that their writes fail."""
    doomed = folder.with_name(f"{folder.name.split('.')[0]}.{os.getpid()}-{time.monotonic_ns()}.partial")
    try:
        folder.rename(doomed)
    except OSError:
        doomed = folder
    shutil.rmtree(doomed, ignore_errors=True)


def commit(partial: Path, target: Path) -> None:
    """Make the complete and durable `partial` visible under its final name, atomically and durably."""
    sync_folder(partial)
    old = target.with_name(target.name + ".replaced")
    if target.is_dir():
        target.rename(old)
    partial.rename(target)
    sync_folder(target.parent)
    if old.is_dir():
        discard(old)


def prune(directory: Path, newest: int, keep: int, pinned: Collection[int] = ()) -> None:
    """Remove all but the `keep` newest steps up to `newest` and the `pinned` ones.

    Later steps belong to another history and stay.
    """
    steps = [step for step in list_checkpoints(directory) if step <= newest]
    for step in (one for one in steps[keep:] if one not in pinned):
        folder = locate(directory, step)
        if folder is not None:
            discard(folder)


def set_aside(directory: Path | str, step: int) -> Path:
    """Quarantine a damaged checkpoint: take it out of the list without removing it; return its new folder.

    Raises BadInput where there is no checkpoint of that step.
    """
    folder = locate(Path(directory), step)
    if folder is None:
        raise bad_input(
            wanted=f"a checkpoint of step {step} in {directory}",
            got="none",
            do="give the step of a checkpoint that is there",
        )
    count = 0
    while (aside := folder.with_name(f"step-{step:08d}.aside-{count}")).exists():
        count += 1
    folder.rename(aside)
    sync_folder(aside.parent)
    return aside


def sync_folder(folder: Path) -> None:
    """Make renames and new files in a folder durable (fsync)."""
    with synced(folder):
        pass


@contextmanager
def synced(folder: Path) -> Iterator[None]:
    """Make durable (fsync) what the body renames or adds in `folder`.

    The folder is opened before the body: a leader that sees the last manifest may rename the folder at once.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        yield
        os.fsync(handle)
    finally:
        os.close(handle)


def wait_until(
    done: Callable[[], bool], *, deadline_s: float, abort: Callable[[], bool], what: Callable[[], str]
) -> None:
    """Poll until `done` returns true; raises RunFailed with `what()` after `deadline_s`, or at once when `abort` is
    true.
    """
    end, pause_s = time.monotonic() + deadline_s, 0.002
    while not done():
        if abort():
            raise RunFailed(f"the save was cancelled while waiting for {what()}")
        if time.monotonic() > end:
            raise RunFailed(f"waited {deadline_s:.0f} s for {what()}")
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.1)
