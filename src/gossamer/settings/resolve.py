"""The resolution of defaults, a file and the command line into one configuration, with the origin of every value."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossamer.settings.describe import leaves
from gossamer.settings.overrides import COMMAND_LINE, put, put_written
from gossamer.settings.read import ParsedFile, read
from gossamer.settings.validation_errors import DEFAULT, check
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput

PYTHON = "python"


@dataclass(frozen=True, slots=True)
class Resolved:
    """A configuration; `origin` maps each dotted key, and each index in a list, to the origin of its value.

    An origin is "default", "run.yaml:12", "command line", "python", "environment" or "planner: <reason>".
    """

    config: RunConfig
    origin: Mapping[str, str]

    @staticmethod
    def of(config: RunConfig, *, origin: str = PYTHON) -> Resolved:
        """Return a configuration made in Python: `origin` is that of every value that differs from its default."""
        default = RunConfig()
        where = {k: DEFAULT if value_at(config, k) == value_at(default, k) else origin for k, _ in leaves()}
        return Resolved(config, where)

    def replace(self, key: str, value: Any, *, origin: str) -> Resolved:
        """Return the configuration with one value replaced, from `origin`; raises BadInput if it does not fit."""
        written = put(ParsedFile(self.config.model_dump(), {}), key, value, origin)
        kept = {k: where for k, where in self.origin.items() if not k.startswith(f"{key}.")}
        return Resolved(check(written.values, written.lines), {**kept, key: origin})


def load(path: Path | None, overrides: Iterable[str] = (), *, given: Mapping[str, Any] | None = None) -> Resolved:
    """Load the configuration in `path`, or `given` in Python (neither: all defaults), under key=value `overrides`.

    Raises one BadInput that lists every mistake, each with file:line, key, the wanted and the given value.
    """
    assert path is None or given is None, "one or the other"
    values = given or {}
    written = read(path) if path is not None else ParsedFile(values, dict(_said_in_python(values)))
    return resolve(written, overrides)


def _said_in_python(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        yield f"{above}{name}", PYTHON
        if isinstance(value, Mapping):
            yield from _said_in_python(value, f"{above}{name}.")


def override(config: RunConfig, overrides: Iterable[str]) -> RunConfig:
    """Return `config` under key=value overrides; raises BadInput."""
    return resolve(ParsedFile(config.model_dump(), {}), overrides).config


def resolve(written: ParsedFile, overrides: Iterable[str]) -> Resolved:
    """Return `written` under key=value `overrides`, checked; raises one BadInput that lists every mistake."""
    values = {k: {} if v is None and k in RunConfig.model_fields else v for k, v in written.values.items()}
    written = ParsedFile(values, written.lines)  # a section with nothing below it is a section of defaults
    mistakes = []
    for given in overrides:
        try:
            written = put_written(written, given)
        except BadInput as error:
            mistakes.append(error)
    config = check(written.values, written.lines, mistakes)
    items = {k: where for k, where in written.lines.items() if _inside_list(k, config)}
    return Resolved(config, {**{key: _origin(key, written.lines) for key, _ in leaves()}, **items})


def value_at(config: RunConfig, key: str) -> Any:
    """Return the value of a dotted key of the schema."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def schema() -> dict[str, Any]:
    """Return the JSON Schema of a configuration file, for editors that complete and check."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **RunConfig.model_json_schema()}


def _inside_list(key: str, config: RunConfig) -> bool:
    """Return whether `key` is an index in a list that is a value: its lines are far apart in a file."""
    around = next((leaf for leaf, _ in leaves() if key.startswith(f"{leaf}.")), "")
    return bool(around) and isinstance(value_at(config, around), list)


def _origin(key: str, lines: Mapping[str, str]) -> str:
    below = [where for k, where in lines.items() if k.startswith(f"{key}.")]
    own = lines.get(key) or next((where for where in below if where != COMMAND_LINE), DEFAULT)
    if COMMAND_LINE in below and own != COMMAND_LINE:  # only a part of the value was changed
        return f"{own}, {COMMAND_LINE}"
    return own
