"""All that a run has left: its records after resumes, its files, and what could not be read of them."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from gossamer.spec import records as kinds
from gossamer.spec import upgrade
from gossamer.spec.errors import BadInput
from gossamer.spec.plan import Plan
from gossamer.view.run_directory import RunDirectory
from gossamer.view.run_lock import Holder, holder_of
from gossamer.view.summary import summary_of

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, kw_only=True)
class RunHistory:
    """A run as one value. Steps that a resume repeated are there once, with their last values.

    `notes` says, in sentences, what of its files could not be read: a view shows them, and goes on with the rest.
    """

    run: RunDirectory
    records: tuple[kinds.Record, ...]
    summary: Mapping[str, Any]
    configuration: Mapping[str, Any]  # dotted key -> value, as in run.yaml; empty: not there
    provenance: Mapping[str, str]
    plan: Plan | None
    fingerprint: str  # of the data; "": not known
    holder: Holder | None  # who trains in it now
    notes: tuple[str, ...] = ()
    start: kinds.Start | None = None
    steps: tuple[kinds.Step, ...] = ()  # committed, ascending
    evaluations: tuple[kinds.Evaluation, ...] = ()  # ascending
    events: tuple[kinds.Event, ...] = field(default=())

    @staticmethod
    def read(run: RunDirectory) -> RunHistory:
        """Read a run directory, also one that is empty, cut short, of a newer version, or still trained in."""
        found, notes = _records(run)
        plan = _plan(run, notes)
        return RunHistory(
            run=run,
            records=tuple(found),
            summary=summary_of(run, found, plan=plan),
            configuration=_configuration(run, notes),
            provenance=_provenance(run, notes),
            plan=plan,
            fingerprint=_fingerprint(run, found),
            holder=holder_of(run.path),
            notes=tuple(notes),
            **_sorted(found),
        )

    @property
    def name(self) -> str:
        return self.run.name

    @property
    def outcome(self) -> str:
        """Return done, failed or interrupted; running while a process trains; unfinished, or empty without a start."""
        if self.holder is not None:
            return "running"
        said = str(self.summary["outcome"])
        return "empty" if said == "unfinished" and self.start is None else said

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """Return the tokens that the run had seen after each of its steps."""
        total, found = 0, []
        for step in self.steps:
            total += step.tokens
            found.append(total)
        return tuple(found)

    def until(self, step: int) -> tuple[kinds.Step, ...]:
        """Return the committed steps up to and including `step`."""
        return self.steps[: bisect_right(self.steps, step, key=lambda one: one.step)]


def _records(run: RunDirectory) -> tuple[list[kinds.Record], list[str]]:
    """Return the readable records, and notes on lines that were skipped."""
    found: list[kinds.Record] = []
    damaged, unknown = 0, 0
    try:
        with run.records_file.open("r", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if (record := kinds.read_record(line) if line.startswith("{") else None) is not None:
                    found.append(record)
                elif line.strip():
                    is_whole = _is_json(line)
                    damaged, unknown = damaged + (not is_whole), unknown + is_whole
    except FileNotFoundError:
        return [], [f"There is no {run.records_file.name} yet."]
    except OSError as error:
        return found, [f"{run.records_file.name} cannot be read: {error.strerror}."]
    notes = []
    if damaged:
        notes.append(f"Of the records, lines that are cut short were left out: {damaged}.")
    if unknown:
        notes.append(
            f"Of the records, lines of kinds or forms that this version does not know were left out: {unknown}."
        )
    if not found:
        notes.append(f"{run.records_file.name} holds no record{' besides' if notes else ' yet'}.")
    return found, notes


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _sorted(found: list[kinds.Record]) -> dict[str, Any]:
    """Return the last start, the steps and evaluations that count after resumes, and all events."""
    start: kinds.Start | None = None
    steps: dict[int, kinds.Step] = {}
    evaluations: dict[int, kinds.Evaluation] = {}
    events = []
    for record in found:
        if isinstance(record, kinds.Step):
            if record.committed:
                steps[record.step] = record
        elif isinstance(record, kinds.Start):
            start = record
            steps = {number: one for number, one in steps.items() if number <= record.step}
            evaluations = {number: one for number, one in evaluations.items() if number <= record.step}
        elif isinstance(record, kinds.Evaluation):
            evaluations[record.step] = record
        elif isinstance(record, kinds.Event):
            events.append(record)
    return {
        "start": start,
        "steps": tuple(steps[number] for number in sorted(steps)),
        "evaluations": tuple(evaluations[number] for number in sorted(evaluations)),
        "events": tuple(events),
    }


def _configuration(run: RunDirectory, notes: list[str]) -> dict[str, Any]:
    try:
        written = yaml.load(run.config_file.read_text("utf-8"), _Loader)
    except FileNotFoundError:
        notes.append(f"There is no {run.config_file.name}.")
        return {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        notes.append(f"{run.config_file.name} cannot be read: {str(error).splitlines()[0]}.")
        return {}
    if not isinstance(written, dict):
        notes.append(f"{run.config_file.name} holds no configuration.")
        return {}
    return dotted(upgrade.configuration(written))


def dotted(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one, by dotted key; an empty one stays a value."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            found.update(dotted(value, f"{prefix}{name}."))
        else:
            found[f"{prefix}{name}"] = value
    return found


def written(value: Any) -> str:
    """Return a value of a configuration on one line, as JSON without quotes around a plain text."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _provenance(run: RunDirectory, notes: list[str]) -> dict[str, str]:
    try:
        return run.provenance()
    except (OSError, ValueError, AttributeError):
        notes.append(f"{run.provenance_file.name} cannot be read.")
        return {}


def _plan(run: RunDirectory, notes: list[str]) -> Plan | None:
    try:
        return run.plan()
    except BadInput as error:
        notes.append(f"The plan is left out: {error}.")
        return None


def _fingerprint(run: RunDirectory, found: list[kinds.Record]) -> str:
    """Return the fingerprint of the data: of the last start, else of data.json, else of the newest checkpoint."""
    said = [one.data_fingerprint for one in found if isinstance(one, kinds.Start) and one.data_fingerprint]
    if said:
        return said[-1]
    kept = _json(run.data_file)
    if isinstance(kept, dict) and kept.get("fingerprint"):
        return str(kept["fingerprint"])
    for file in sorted(run.checkpoints.glob("step-*/manifest.json"), reverse=True):
        manifest = _json(file)
        try:
            return str(manifest["body"]["parts"][0]["meta"]["data"])
        except (TypeError, KeyError, IndexError):
            continue
    return ""


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text("utf-8"))
    except (OSError, ValueError):
        return None
