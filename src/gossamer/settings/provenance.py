"""The resolved configuration as text, with the origin of each value; and the configuration of an earlier run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from gossamer.settings.overrides import COMMAND_LINE
from gossamer.settings.read import ParsedFile, read
from gossamer.settings.resolve import Resolved, resolve
from gossamer.settings.validation_errors import DEFAULT
from gossamer.settings.yaml_io import flow
from gossamer.spec import upgrade
from gossamer.spec.errors import bad_input
from gossamer.view.run_directory import find_run

_COLUMN = 44


def show(resolved: Resolved) -> str:
    """Return the configuration as YAML, with its origin behind each value; `load` reads it back equal."""
    return "\n".join(_section(resolved, resolved.config, "", 0)) + "\n"


def _section(resolved: Resolved, model: BaseModel, prefix: str, depth: int) -> Iterator[str]:
    for name, value in model:
        key, indent = f"{prefix}{name}", "  " * depth
        if isinstance(value, BaseModel):
            yield f"{indent}{name}:"
            yield from _section(resolved, value, f"{key}.", depth + 1)
        else:
            yield f"{f'{indent}{name}: {flow(_plain(value))}':<{_COLUMN}}  # {resolved.origin.get(key, DEFAULT)}"


def _plain(value: Any) -> Any:
    """Return a value with the sections in a list as mappings, without what is left at its default."""
    if isinstance(value, list):
        return [one.model_dump(exclude_defaults=True) if isinstance(one, BaseModel) else one for one in value]
    return value


def reload(run_dir: Path, overrides: Iterable[str] = ()) -> Resolved:
    """Return the configuration of an earlier run under new key=value `overrides`; other origins stay those of its
    start.

    Raises BadInput for a directory that holds no run, or no run.yaml.
    """
    directory = find_run(run_dir)
    if not directory.config_file.exists():
        raise bad_input(
            wanted=f"{directory.config_file}, the configuration of the run",
            got="no such file",
            do="restore it: `gossamer config show FILE`, with the file that the run was started with, prints the same",
        )
    written = read(directory.config_file)
    lines = {upgrade.dotted(key): where for key, where in written.lines.items()}
    resolved = resolve(ParsedFile(upgrade.configuration(written.values), lines), overrides)
    earlier = directory.provenance()
    origin = {k: v if COMMAND_LINE in v else earlier.get(k, v) for k, v in resolved.origin.items()}
    return Resolved(resolved.config, origin)
