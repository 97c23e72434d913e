"""The phases of a run (`train.phases`): the configuration of each, which is the run's with the keys that differ."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from gossamer.settings.overrides import put
from gossamer.settings.read import ParsedFile
from gossamer.settings.resolve import Resolved, resolve
from gossamer.settings.validation_errors import DEFAULT, place
from gossamer.spec.config import PhaseSection, RunConfig
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.method_config import Written
from gossamer.view.run_directory import RunDirectory

KEY = "train.phases"
_SECTIONS = ("model", "data", "train", "machines", "plan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One phase of a run, which is a run itself.

    number: from 1; by: the method that makes its weights of those of the phase before, None: they are the same;
    directory: of its run; start: the start folder it begins from, None for the first.
    """

    number: int
    name: str
    by: Written | None
    resolved: Resolved
    directory: RunDirectory
    start: Path | None

    @property
    def config(self) -> RunConfig:
        return self.resolved.config

    @property
    def is_begun(self) -> bool:
        """Return whether there is something of it already: no earlier phase changes any more."""
        return self.directory.config_file.exists() or (self.start is not None and self.start.is_dir())

    def key(self, part: str = "") -> str:
        """Return the key of the configuration that describes it."""
        return f"{KEY}.{self.number - 1}{part and f'.{part}'}"


def phases_of(resolved: Resolved, run: Path) -> list[Phase]:
    """Return the phases of a run in the folder `run`, each with its configuration. Raises BadInput."""
    written = resolved.config.train.phases
    values = resolved.config.model_dump()
    values["train"]["phases"] = []
    lines = {k: w for k, w in resolved.origin.items() if w != DEFAULT and not f"{k}.".startswith(f"{KEY}.")}
    here = _seen_from_here(run)
    found = []
    for index, section in enumerate(written):
        where = place(f"{KEY}.{index}", resolved.origin)
        name = f"{index + 1:02d}-{section.name}"
        start = here / "starts" / name if index else None
        _check_entry(section, index)
        try:
            config = _changed(ParsedFile(values, lines), section, start, where if where != DEFAULT else KEY)
        except BadInput as error:
            raise of_phase(error, section.name) from None
        found.append(
            Phase(
                number=index + 1,
                name=section.name,
                by=section.by,
                resolved=config,
                directory=RunDirectory(here / "phases" / name),
                start=start,
            )
        )
    return found


def of_phase(error: BadInput, name: str) -> BadInput:
    """Return an error about the configuration of a phase, with its name in front."""
    return BadInput(f"phase {name}: {error}")


def _changed(written: ParsedFile, section: PhaseSection, start: Path | None, where: str) -> Resolved:
    for part in _SECTIONS:
        for key, value in getattr(section, part).items():
            written = put(written, f"{part}.{key}", value, where)
    if start is not None:
        written = put(written, "model.start", str(start), where)
    return resolve(written, ())


def _check_entry(section: PhaseSection, index: int) -> None:
    key = f"{KEY}.{index}"
    if "phases" in section.train:
        do = "write its phases into the one list"
        raise bad_input(wanted="phases without phases of their own", got=f"one in {section.name}", do=do, key=key)
    if index and "start" in section.model:
        raise bad_input(
            wanted=f"a phase {section.name} that begins with the weights of the phase before",
            got="model.start",
            do="leave model.start out; the method `by` says what is made of them",
            key=key,
        )
    if not index and section.by is not None:
        raise bad_input(
            wanted=f"a first phase {section.name} that begins with the model of the run",
            got=f"by {section.by}",
            do="use the command first (gossamer grow, prune or quantize), and name its folder as model.start",
            key=f"{key}.by",
        )


def _seen_from_here(run: Path) -> Path:
    """Return a path that stays right where the current folder is moved with the run in it."""
    path = Path(os.path.relpath(run))
    return run.absolute() if path.parts[:1] == ("..",) else path


def refuse_phases(config: RunConfig, where: str) -> None:
    """Raise BadInput for phases where `where` cannot run them."""
    if config.train.phases:
        raise bad_input(
            wanted="a run without phases",
            got=f"{len(config.train.phases)} phases {where}",
            do="start it with `gossamer train run.yaml`, or run one phase at a time with model.start",
            key=KEY,
        )
