"""Paths of log files, error reports and checkpoints in a run directory."""

from __future__ import annotations

import re
from pathlib import Path

_CHECKPOINT = re.compile(r"step-\d{8,}")


def log_file(rundir: Path, rank: int) -> Path:
    """Return the path of a rank's log file."""
    return rundir / "logs" / f"rank-{rank:05d}.log"


def errors_folder(rundir: Path) -> Path:
    """Return the folder of the error reports, one JSON file per failing rank."""
    return rundir / "errors"


def lacks_checkpoint(rundir: Path) -> bool:
    """Return whether a run of `gossamer train` has no checkpoint to resume from, judged by file names.

    False for a folder without run.yaml: other programs resume in their own way.
    """
    if not (rundir / "run.yaml").exists():
        return False
    folder = rundir / "checkpoints"
    return not folder.is_dir() or not any(_CHECKPOINT.fullmatch(path.name) for path in folder.iterdir())
