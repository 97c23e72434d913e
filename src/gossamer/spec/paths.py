"""Where the parts of a run directory are. One folder per run; everything about the run is in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RunPaths:
    """The files of the run in `root`."""

    root: Path

    @property
    def records(self) -> Path:
        """Append-only JSON lines (spec.records): the single source of truth."""
        return self.root / "records.jsonl"

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.root / "run.yaml"

    @property
    def provenance(self) -> Path:
        """Where each value of the configuration came from."""
        return self.root / "provenance.json"

    @property
    def plan(self) -> Path:
        return self.root / "plan.yaml"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def errors(self) -> Path:
        """One JSON file per rank that failed: its kind, message, place."""
        return self.root / "errors"
