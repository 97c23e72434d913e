"""The directory of a run: its records, configuration, plan and checkpoints, in files that people and programs can read.

records.jsonl     one record per line (spec/records.py); append-only, one writer: the source of truth
run.yaml          the resolved configuration      provenance.json   the origin of each of its values
plan.yaml         the plan of the run             checkpoints/      the saved states
began.json        the folder it began in          tokenizer/ model/ for sampling and export (job/run_files.py)
proved.json       the layout whose gradients were proved equal to those of one process
logs/             the log of each rank
phases/NN-NAME/   of a run in phases (`train.phases`): a run directory per phase
starts/NN-NAME/   the start folder that a phase after the first begins from
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from gossamer.spec import upgrade
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.plan import PLAN_FORMAT, Plan
from gossamer.spec.records import End, Record, Saved, read_record
from gossamer.spec.suggest import nearest
from gossamer.view.tail import Tail

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # what Gossamer wrote itself: the same, ten times as fast
RUNS = Path("runs")  # where runs are looked for: the default of run.directory
LATEST = "latest"
_SHOWN = 6  # names in a message
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")


class _PlanDumper(yaml.SafeDumper):
    """The YAML dumper of plans: lists of numbers, which may be long, are on as few lines as they need."""

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> yaml.SequenceNode:
        numbers = bool(sequence) and all(isinstance(one, int | float) for one in sequence)
        return super().represent_sequence(tag, sequence, True if numbers else flow_style)


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The files of one run. Constructing it touches no disk."""

    path: Path

    @staticmethod
    def create(runs: Path, name: str, *, now: float | None = None) -> RunDirectory:
        """Make the directory `runs/YYYYMMDD-HHMMSS-name`; append "-2", "-3", ... where the name is taken.

        `now` is seconds since the epoch. `mkdir` reserves the name, so two commands never share one. Raises BadInput
        where it cannot be made.
        """
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
        stem = f"{stamp}-{_NOT_IN_NAMES.sub('-', name).strip('-.') or 'run'}"
        try:
            runs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _not_writable(runs, error) from None
        count = 1
        while True:
            path = runs / (stem if count == 1 else f"{stem}-{count}")
            try:
                path.mkdir()
            except FileExistsError:
                count += 1
            except OSError as error:
                raise _not_writable(runs, error) from None
            else:
                return RunDirectory(path)

    @staticmethod
    def named(runs: Path, name: str) -> RunDirectory:
        """Return the directory `runs/name`, to which all ranks of a launcher write; touches no disk.

        Raises BadInput for what is not the name of one folder, such as "..": the run would lie elsewhere.
        """
        if name in ("", ".", "..") or any(mark in name for mark in "/\\\0"):
            raise bad_input(
                wanted="the name of one folder",
                got=repr(name),
                do="write a name without / and \\, other than . and ..; run.directory says where the folder is",
                key="run.name",
            )
        return RunDirectory(runs / name)

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def records_file(self) -> Path:
        return self.path / "records.jsonl"

    @property
    def config_file(self) -> Path:
        return self.path / "run.yaml"

    @property
    def provenance_file(self) -> Path:
        return self.path / "provenance.json"

    @property
    def plan_file(self) -> Path:
        return self.path / "plan.yaml"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def proved_file(self) -> Path:
        return self.path / "proved.json"

    @property
    def data_file(self) -> Path:
        return self.path / "data.json"

    @property
    def began_file(self) -> Path:
        return self.path / "began.json"

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def phases(self) -> list[RunDirectory]:
        """The phases that have begun, in order; none: the run is not in phases."""
        folder = self.path / "phases"
        found = sorted(folder.iterdir()) if folder.is_dir() else []
        return [RunDirectory(one) for one in found if (one / "run.yaml").is_file()]

    def last_phase(self) -> RunDirectory:
        """Return the last phase with a checkpoint, the last that has begun where none has one; else the run itself."""
        begun = self.phases
        saved = [
            one for one in begun if any(not each.name.endswith(".partial") for each in one.checkpoints.glob("step-*"))
        ]
        return (saved or begun or [self])[-1]

    def log_file(self, rank: int) -> Path:
        """Return the log file of `rank`."""
        return self.path / "logs" / f"rank-{rank:05d}.log"

    def append(self, record: Record) -> None:
        """Append one record as a line, complete or (in a crash) cut short, never mixed with another.

        A line that an earlier crash cut short is ended first, so that it damages no other. A checkpoint and the end of
        the run are forced to the disk; other lines survive the process, but not a power cut. Raises OSError, e.g. on a
        full disk.
        """
        line = record.line().encode("ascii") + b"\n"
        self.path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.records_file, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                line = b"\n" + line
            while line:
                line = line[os.write(descriptor, line) :]
            if isinstance(record, (Saved, End)):
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def records(self) -> Iterator[Record]:
        """Yield all readable records in order; lines cut short and unknown kinds (of a newer version) are skipped.

        Raises BadInput where there is something that cannot be read.
        """
        if not self.records_file.exists():
            return
        try:
            with self.records_file.open("r", encoding="utf-8", errors="replace") as lines:
                for line in lines:
                    if line.startswith("{") and (record := read_record(line)) is not None:
                        yield record
        except OSError as error:
            raise bad_input(
                wanted=f"a readable {self.records_file.name} in {self.path}",
                got=error.strerror or str(error),
                do="restore that file, or name another run directory",
            ) from None

    def tail(self) -> Tail:
        """Return a reader whose `read` returns the records added since its last call."""
        return Tail(self.records_file)

    def follow(
        self,
        *,
        poll_s: float = 0.25,
        stop: Callable[[], bool] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> Iterator[Record]:
        """Yield all records, then each new one as it is written, until `End` is the last line or `stop()` returns true.

        The file need not exist yet. A record written before `stop` turned true is still yielded. `poll_s`: seconds
        between reads.
        """
        tail, ended = self.tail(), False
        while True:
            last_look = ended or (stop is not None and stop())
            for record in tail.read():
                ended = isinstance(record, End)
                yield record
            if last_look or ended:
                return
            sleep(poll_s)

    def keep(self, config: RunConfig, provenance: Mapping[str, str]) -> None:
        """Write run.yaml and provenance.json, and at first began.json; each appears completely or not at all."""
        self.path.mkdir(parents=True, exist_ok=True)
        if not self.began_file.exists():
            _write(self.began_file, json.dumps(self._beginning(Path.cwd()), indent=1) + "\n")
        _write(self.config_file, yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, width=100))
        _write(self.provenance_file, json.dumps(dict(provenance), indent=1) + "\n")

    def keep_plan(self, plan: Plan) -> None:
        """Write plan.yaml; it appears completely or not at all."""
        self.path.mkdir(parents=True, exist_ok=True)
        text = yaml.dump(plan.model_dump(mode="json"), Dumper=_PlanDumper, sort_keys=False, width=100)
        _write(self.plan_file, text)

    def _beginning(self, folder: Path) -> dict[str, str | None]:
        path = self.path.resolve()
        inside = path.relative_to(folder.resolve()).as_posix() if path.is_relative_to(folder.resolve()) else None
        return {"folder": str(folder), "run": inside}

    def began_in(self) -> tuple[Path | None, Path | None]:
        """Return the folder the run began in, and the run's path within it; None where unknown, or outside."""
        try:
            said = json.loads(self.began_file.read_text("utf-8"))
            folder, inside = said["folder"], said["run"]
        except (OSError, ValueError, KeyError, TypeError):
            return None, None
        return (Path(folder) if folder else None), (Path(inside) if inside else None)

    def config(self) -> RunConfig:
        """Read run.yaml; raises BadInput where it is missing or damaged."""
        try:
            written = self._yaml(self.config_file)
            return RunConfig.model_validate(upgrade.configuration(written) if isinstance(written, dict) else written)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            raise bad_input(
                wanted=f"a configuration of this version in {self.config_file}",
                got=f"{first['msg']} at {key or 'its top'}",
                do="restore the file that the run wrote, or use the version of Gossamer that wrote it",
            ) from None

    def plan(self) -> Plan | None:
        """Read plan.yaml; None where the run has none. Raises BadInput for one that cannot be read."""
        return plan_in(self.plan_file) if self.plan_file.exists() else None

    def provenance(self) -> dict[str, str]:
        """Return dotted key -> origin of its value; empty where it was not kept."""
        if not self.provenance_file.exists():
            return {}
        written = json.loads(self.provenance_file.read_text("utf-8"))
        return {upgrade.dotted(str(key)): str(value) for key, value in written.items()}

    def _yaml(self, file: Path) -> Any:
        try:
            return yaml.load(file.read_text("utf-8"), _Loader)
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            said = str(error).splitlines()[0]
            raise bad_input(
                wanted=f"a readable {file.name} in {self.path}",
                got=said,
                do="restore that file, or name another run directory",
            ) from None


def plan_in(file: Path) -> Plan:
    """Read the plan in a file; raises BadInput, with the field that is wrong, where it cannot be read or is none."""
    try:
        found = yaml.load(file.read_text("utf-8"), _Loader)
    except OSError as error:
        do = "give the plan.yaml of a run directory"
        raise BadInput(f"cannot read the plan {file}: {error.strerror}: {do}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        do = "Give the plan.yaml of a run directory"
        raise BadInput(f"{file} is no plan: {str(error).splitlines()[0]}. {do}") from None
    try:
        is_earlier = isinstance(found, dict) and found.get("format") in range(1, PLAN_FORMAT)
        return Plan.model_validate(upgrade.plan(found) if is_earlier else found)
    except ValidationError as error:
        one = error.errors()[0]
        at, said = ".".join(map(str, one["loc"])), str(one["msg"]).removeprefix("Value error, ")
        said = "there is no such field" if one["type"] == "extra_forbidden" else said
        place = f"{at}: " if at else ""
        raise BadInput(
            f"{file} is no plan: {place}{said}. Correct the file, or remove it (and --plan): the run then makes a plan"
        ) from None


def latest(runs: Path) -> RunDirectory:
    """Return the run under `runs` that was written to last; raises BadInput where there is none."""
    found = run_folders(runs)
    if not found:
        raise bad_input(
            wanted=f"a run under {runs}", got="none", do="start one with `gossamer train`, or name a run directory"
        )
    return RunDirectory(found[0])


def newest_like(
    runs: Path, config: RunConfig, *, is_fit: Callable[[RunDirectory], bool] = lambda run: True
) -> RunDirectory | None:
    """Return the newest run under `runs` with exactly this configuration that `is_fit` accepts; None without one."""
    begun = list[tuple[float, Path]]()
    for file in runs.glob("*/run.yaml"):
        with suppress(OSError):  # a link to nothing, or a run that has just gone
            begun.append((file.stat().st_mtime, file.parent))
    wanted = config.model_dump(mode="json")  # as files hold it: a program may have given tuples
    for _, folder in sorted(begun, reverse=True):
        found = RunDirectory(folder)
        with suppress(BadInput):  # a damaged one, or one of another version, is not alike
            if found.config().model_dump(mode="json") == wanted and is_fit(found):
                return found
    return None


def check_new(directory: RunDirectory, *, resume: str, is_other: bool = False) -> None:
    """Raise BadInput where there is a run in the folder, which a new one would train over, checkpoints and all.

    `resume`: how the user asks to go on with it. `is_other`: it was asked for, and has other settings.
    """
    has_checkpoints = any(directory.checkpoints.glob("step-*"))
    if _written_at(directory.path) is None and not has_checkpoints:
        return
    raise bad_input(
        wanted=f"a new run, or {resume}",
        got=f"{directory.path}, which is there already" + (" with other settings" if is_other else ""),
        do=f"set run.name to another name, or give {resume} with the settings that it has",
        key="run.name",
    )


def open_run(path: Path) -> RunDirectory:
    """Return the run at `path`, or the one that it names: every command and function that takes a run calls this.

    Of a run in phases it is the last phase with a checkpoint. See `find_run`.
    """
    return find_run(path).last_phase()


def find_run(path: Path) -> RunDirectory:
    """Return the run at `path`, or the one that it names, which may be one in phases.

    A name is that of a folder under "runs" (or, written DIR/NAME, under DIR), a part of such a name that only one
    has, or "latest": the run that was written to last. A folder that is a run comes before them. Raises BadInput where
    there is no such run, or where there are several.
    """
    if _written_at(path) is not None:
        return RunDirectory(path)
    runs = path.parent if len(path.parts) > 1 else RUNS
    found = [run for run in (runs / path.name, *_named(runs, path.name)) if _written_at(run) is not None]
    if len(found) == 1 or (found and found[0].name == path.name):
        return RunDirectory(found[0])
    if path.name == LATEST and runs.is_dir():
        return latest(runs)
    raise _several(path, found) if found else _none_named(path, runs)


def names_run(path: Path) -> bool:
    """Return whether `open_run` finds a run by this name, or several."""
    runs = path.parent if len(path.parts) > 1 else RUNS
    if _written_at(path) is not None or (path.name == LATEST and bool(run_folders(runs))):
        return True
    return any(_written_at(run) is not None for run in (runs / path.name, *_named(runs, path.name)))


def _named(runs: Path, part: str) -> list[Path]:
    """Return the folders whose name contains `part`, in any case, the newest name first; but not `part` itself."""
    inside = [path for path in _folders(runs) if part and part.lower() in path.name.lower() and path.name != part]
    return sorted(inside, key=lambda path: path.name, reverse=True)


def _several(path: Path, found: list[Path]) -> BadInput:
    shown = ", ".join(run.name for run in found[:_SHOWN]) + (", ..." if len(found) > _SHOWN else "")
    return bad_input(
        wanted=f"one run for {str(path)!r}",
        got=f"{len(found)}: {shown}",
        do=f"write more of the name, or {LATEST!r} for the one that was written to last",
    )


def _none_named(path: Path, runs: Path) -> BadInput:
    if path.exists():
        got = "a folder without records.jsonl and run.yaml" if path.is_dir() else "a file"
    else:
        names = [run.name for run in _folders(runs) if _written_at(run) is not None]
        got = "no such folder"
        got += f", and {runs} has no run of that name ({nearest(path.name, names[-_SHOWN:])})" if names else ""
    return bad_input(
        wanted=f"a run directory at {path}",
        got=got,
        do="name the folder that `gossamer train` printed, or a part of a name that `gossamer runs` lists",
    )


def run_folders(runs: Path) -> list[Path]:
    """Return the folders of the runs under `runs`, the one that was written to last first."""
    found = [(newest, path.name, path) for path in _folders(runs) if (newest := _written_at(path)) is not None]
    return [path for _, _, path in sorted(found, reverse=True)]


def _folders(runs: Path) -> list[Path]:
    return [path for path in runs.iterdir() if os.path.isdir(path)] if os.path.isdir(runs) else []


def _written_at(path: Path) -> float | None:
    """Return when a run was last written to; None for what is no run, or may not be read, or has just gone."""
    times = []
    files = [path / "records.jsonl", path / "run.yaml"]
    for file in (*files, *(path / "phases").glob("*/records.jsonl")):
        with suppress(OSError):
            times.append(file.stat().st_mtime)
    return max(times, default=None)


def _write(file: Path, text: str) -> None:
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    with beside.open("w", encoding="utf-8") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    os.replace(beside, file)


def _not_writable(runs: Path, error: OSError) -> Exception:
    return bad_input(
        wanted=f"a folder for runs at {runs}",
        got=error.strerror or str(error),
        do="set run.directory to a folder you can write to",
        key="run.directory",
    )
