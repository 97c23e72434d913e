"""What a list of runs shows of each, read from the first and the last lines of its records alone.

A run of 100,000 steps has 35 MB of records; a folder may hold a thousand runs. No line between is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gossamer.spec.records import End, Evaluation, Length, Record, Start, Step, read_record
from gossamer.view.run_directory import RunDirectory, run_folders
from gossamer.view.run_lock import holder_of

OUTCOMES = ("done", "failed", "interrupted", "running", "unfinished", "empty")
_HEAD, _TAIL, _FAR_TAIL = 1 << 14, 1 << 15, 1 << 18  # bytes
_KIND = re.compile(rb'\s*\{\s*"kind"\s*:\s*"(\w+)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Glance:
    """One run of a list. None: not known, or not in the lines that were read.

    `outcome` is one of OUTCOMES: "unfinished" is a run without an end in which nobody trains, "empty" one without a
    start. `holder` says who trains in it. Losses are in `loss_unit`; times in seconds since the epoch.
    """

    name: str
    directory: str
    outcome: str
    step: int = 0
    steps_wanted: int | None = None
    model: str = ""
    data: str = ""
    ranks: int | None = None
    exchange: str = ""
    parameters: int | None = None
    loss: float | None = None
    loss_unit: str = ""
    validation_step: int | None = None
    validation_loss: float | None = None
    validation_bits_per_byte: float | None = None
    started_s: float | None = None
    written_s: float | None = None
    message: str = ""
    holder: str = ""


def glances(runs: Path) -> list[Glance]:
    """Return the runs under `runs`, the one that was written to last first; `runs` may also be one run itself."""
    folders = run_folders(runs)
    if not folders and (runs / "records.jsonl").is_file():
        folders = [runs]
    return [glance(RunDirectory(folder)) for folder in folders]


def glance(run: RunDirectory) -> Glance:
    """Return what the first and last lines of a run's records say; a damaged or empty file gives an empty glance."""
    begun = run.phases
    try:
        first, last, written_s = _read((begun[-1] if begun else run).records_file)
    except OSError:
        first, last, written_s = None, _Last(), None
    start, holder = last.start or first, holder_of(run.path)
    evaluation, end = last.evaluation, last.end
    outcome = "running" if holder else end.outcome if end else "unfinished" if start else "empty"
    return Glance(
        name=run.path.absolute().name,
        directory=str(run.path),
        outcome=outcome if outcome in OUTCOMES else "unfinished",
        step=max(last.step.step if last.step else 0, end.step if end else 0, start.step if start else 0),
        steps_wanted=_wanted(start, last),
        model=start.model if start else "",
        data=start.data if start else "",
        ranks=start.ranks if start else None,
        exchange=start.exchange if start else "",
        parameters=start.parameters if start else None,
        loss=last.step.loss if last.step else None,
        loss_unit=start.loss_unit if start else "",
        validation_step=evaluation.step if evaluation else None,
        validation_loss=evaluation.loss if evaluation else None,
        validation_bits_per_byte=evaluation.bits_per_byte if evaluation else None,
        started_s=first.time_s if first else start.time_s if start else None,
        written_s=written_s,
        message=end.message if end else "",
        holder=holder.told() if holder else "",
    )


def _wanted(start: Start | None, last: _Last) -> int | None:
    """Return the number of steps wanted; None where `train.seconds` changed it in lines that were not read."""
    if last.length is not None:
        return last.length.steps
    if start is None or (start.limit_s > 0 and not last.is_complete):
        return None
    return start.steps


@dataclass(slots=True)
class _Last:
    """The last record of each kind, read backwards; `bound` is the step from which the last resume began."""

    start: Start | None = None
    step: Step | None = None
    evaluation: Evaluation | None = None
    length: Length | None = None
    end: End | None = None
    has_evaluation: bool = False  # all of its validation sets
    bound: float = float("inf")
    is_complete: bool = False  # all lines of the run were looked at, or the start that they follow

    def add(self, record: Record) -> None:
        """Take in a record that stands before all others added so far."""
        if isinstance(record, Start):
            self.start = self.start or record
            self.bound = min(self.bound, record.step)
        elif isinstance(record, Step) and self.step is None and record.committed and record.step <= self.bound:
            self.step = record
        elif isinstance(record, Evaluation) and record.step <= self.bound:
            if (
                self.evaluation is None or record.step == self.evaluation.step
            ):  # of the first validation set, in the end
                self.evaluation = record
            else:
                self.has_evaluation = True
        elif isinstance(record, Length) and self.length is None and self.start is None:
            self.length = record
        elif isinstance(record, End) and self.end is None and self.start is None:
            self.end = record

    def needs(self, kind: bytes) -> bool:
        """Return whether a line of that kind could say something new: most lines are steps, and few are parsed."""
        return (
            (kind == b"step" and self.step is None)
            or (kind == b"evaluation" and not self.has_evaluation)
            or (kind in (b"length", b"end") and self.start is None)
            or kind == b"start"
        )


def _read(file: Path) -> tuple[Start | None, _Last, float]:
    with file.open("rb") as source:
        status = source.seek(0, 2)
        written_s = file.stat().st_mtime
        source.seek(0)
        first = next((one for one in _records(source.read(_HEAD).splitlines()) if isinstance(one, Start)), None)
        last = _backwards(source.seek(max(0, status - _TAIL)), source.read(_TAIL))
        if status > _TAIL and last.evaluation is None and last.end is None:
            last = _backwards(source.seek(max(0, status - _FAR_TAIL)), source.read(_FAR_TAIL))
    return first, last, written_s


def _records(lines: list[bytes]) -> Iterator[Record]:
    for line in lines:
        if line.startswith(b"{") and (record := read_record(line.decode("utf-8", "replace"))) is not None:
            yield record


def _backwards(offset: int, block: bytes) -> _Last:
    """Return the last records of each kind in a block; without its first line, if that may be the rest of one."""
    lines = block.splitlines()[1 if offset else 0 :]
    last = _Last()
    for line in reversed(lines):
        kind = _KIND.match(line)
        if kind is None or not last.needs(kind.group(1)):
            continue
        for record in _records([line]):
            last.add(record)
    last.is_complete = not offset or last.start is not None
    return last
