"""Where launching keeps its files in a run directory."""

from __future__ import annotations

import re
from pathlib import Path

_CHECKPOINT = re.compile(r"step-\d{8,}")


def log_file(rundir: Path, rank: int) -> Path:
    """What a rank wrote."""
    return rundir / "logs" / f"rank-{rank:05d}.log"


def errors_folder(rundir: Path) -> Path:
    """Notes of failing ranks, one JSON file each."""
    return rundir / "errors"


def lacks_checkpoint(rundir: Path) -> bool:
    """Whether a run of the command's has none to go on from, as far as names tell; what else is launched has its own
    ways.
    """
    if not (rundir / "run.yaml").exists():
        return False
    folder = rundir / "checkpoints"
    return not folder.is_dir() or not any(_CHECKPOINT.fullmatch(path.name) for path in folder.iterdir())
