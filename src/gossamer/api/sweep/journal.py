"""The folder of a sweep: what was asked, the configuration, the results so far, and the runs.

sweep.json      what was asked: settings, seeds, halving; another sweep in the same folder is refused
run.yaml        the configuration file as it was (or run.toml)
journal.jsonl   one line per trial that ended; a later line of a trial replaces an earlier one
points.jsonl    of a search: the values of each point that its sampler has chosen, in order
trials/NAME/    the run directories of each trial        logs/NAME.log, .err   what each printed
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from gossamer.api.sweep.trial import Trial, TrialResult
from gossamer.spec.errors import BadInput


@dataclass(frozen=True, slots=True)
class SweepFolder:
    """The files of one sweep. Constructing it touches no disk."""

    path: Path

    @property
    def asked_file(self) -> Path:
        return self.path / "sweep.json"

    @property
    def journal_file(self) -> Path:
        return self.path / "journal.jsonl"

    @property
    def points_file(self) -> Path:
        return self.path / "points.jsonl"

    def config_file(self, given: Path) -> Path:
        """Return where the configuration file is kept, in the format it has."""
        return self.path / f"run{given.suffix or '.yaml'}"

    def runs_of(self, trial: Trial) -> Path:
        """Return the folder of a trial's run directories."""
        return self.path / "trials" / trial.name

    def log_of(self, trial: Trial) -> Path:
        """Return the file with what a trial printed on standard output; its errors are beside it in .err."""
        return self.path / "logs" / f"{trial.name}.log"

    def open(self, asked: dict[str, Any], config: Path) -> None:
        """Make the folder, or check that it is one of the same sweep. Raises BadInput."""
        try:
            if self.asked_file.exists():
                self._check(asked)
                return
            if self.path.is_dir() and any(one.name not in (".lock", ".lock.beat") for one in self.path.iterdir()):
                raise BadInput(f"{self.path} is no sweep's folder, and not empty: name another one with --folder")
            self.path.mkdir(parents=True, exist_ok=True)
            self.config_file(config).write_bytes(config.read_bytes())
            beside = self.asked_file.with_name(".sweep.json")
            beside.write_text(json.dumps(asked, indent=1) + "\n", "utf-8")
            beside.replace(self.asked_file)
        except OSError as error:
            raise BadInput(
                f"cannot write the sweep's folder {self.path}: {error.strerror}: name another one with --folder"
            ) from None

    def _check(self, asked: dict[str, Any]) -> None:
        try:
            before = json.loads(self.asked_file.read_text("utf-8"))
        except ValueError:
            raise BadInput(f"{self.asked_file} is damaged: name another folder with --folder") from None
        if before != json.loads(json.dumps(asked)):
            names = [name for name in asked if not isinstance(before, dict) or before.get(name) != asked[name]]
            raise BadInput(
                f"{self.path} holds another sweep (other {', '.join(names)}): nothing was started. "
                "Give the settings of that sweep to go on with it, or name another folder with --folder"
            )

    def results(self) -> dict[str, TrialResult]:
        """Return trial name -> its last result; lines that a crash cut short are skipped."""
        found: dict[str, TrialResult] = {}
        if not self.journal_file.exists():
            return found
        known = {one.name for one in fields(TrialResult)}
        for line in self.journal_file.read_text("utf-8", "replace").splitlines():
            try:
                result = TrialResult(**{name: value for name, value in json.loads(line).items() if name in known})
            except (ValueError, TypeError, AttributeError):
                continue
            found[result.trial] = result
        return found

    def points(self) -> list[dict[str, Any]]:
        """Return the values by key of each point that was chosen, in order; a line that a crash cut short ends them."""
        found = list[dict[str, Any]]()
        if not self.points_file.exists():
            return found
        for line in self.points_file.read_text("utf-8", "replace").splitlines():
            try:
                point = json.loads(line)
            except ValueError:
                break
            if not isinstance(point, dict):
                break
            found.append(point)
        return found

    def keep_points(self, points: Sequence[Mapping[str, Any]]) -> None:
        """Replace the chosen points, and wait until they are on the disk. Raises OSError."""
        beside = self.points_file.with_name(".points.jsonl")
        with beside.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(dict(point)) + "\n" for point in points)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self.points_file)

    def append(self, result: TrialResult) -> None:
        """Append a result to the journal, and wait until it is on the disk. Raises OSError."""
        line = json.dumps(result.line(), separators=(",", ":")).encode() + b"\n"
        with self.journal_file.open("ab+") as file:
            if file.tell():  # a line that a crash cut short is ended first, so that it damages no other
                file.seek(-1, os.SEEK_END)
                line = line if file.read(1) == b"\n" else b"\n" + line
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
