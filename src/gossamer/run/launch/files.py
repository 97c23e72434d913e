"""Where launching keeps its files in a run directory."""

from __future__ import annotations

from pathlib import Path


def log_file(rundir: Path, rank: int) -> Path:
    """What a rank wrote."""
    return rundir / "logs" / f"rank-{rank:05d}.log"


def errors_folder(rundir: Path) -> Path:
    """Notes of failing ranks, one JSON file each."""
    return rundir / "errors"
