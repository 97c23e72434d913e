"""Validation errors of a configuration: every mistake on one line, with its place, the wanted and the given value."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from gossamer.settings.describe import is_text, leaves, section, wanted
from gossamer.settings.yaml_io import flow
from gossamer.spec import earlier_names
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.suggest import nearest

DEFAULT = "default"  # the origin of what nobody wrote
_NAMED = re.compile(r"\b[a-z_]+(?:\.[a-z_]+)+")
_KEY = re.compile(r"([a-z_]+(?:\.[a-z0-9_]+)+): ")


def check(
    values: Mapping[str, Any], lines: Mapping[str, str] | None = None, also: Sequence[BadInput] = ()
) -> RunConfig:
    """Return the configuration of these values; raises one BadInput with a line for every mistake, in order of place.

    `also` holds mistakes found before, to be reported with the others.
    """
    found = dict(_booleans(values))
    config = None
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        for item in error.errors():
            mistake = _mistake(item, values)
            found.setdefault(mistake.key, mistake)
    told = [*(BadInput(m.said, key=m.key) for m in found.values()), *also]
    if config is None or told:
        raise several(told, lines or {})
    return config


def several(mistakes: list[BadInput], lines: Mapping[str, str]) -> BadInput:
    """Merge many errors into one: sorted by place, one line each, with file:line in front where it is known."""
    if len(mistakes) == 1 and not place(mistakes[0].key, lines):
        return mistakes[0]
    told = sorted(mistakes, key=lambda m: _order(place(m.key, lines)))
    text = [f"{where}: {m}" if (where := place(m.key, lines)) else str(m) for m in told]
    return BadInput("\n".join([f"{len(text)} mistakes:", *text] if len(text) > 1 else text))


def located(error: BadInput, origin: Mapping[str, str]) -> BadInput:
    """Return an error about a configuration key with the file:line of that key, and of the other keys that it names.

    The key is `error.key`, or the start of the message ("train.batch: ...").
    """
    key = error.key or (match.group(1) if (match := _KEY.match(error.message)) else "")
    if key.partition(".")[0] not in RunConfig.model_fields:
        return error
    lines = {k: w.rpartition(", ")[2] for k, w in origin.items() if w != DEFAULT}
    where, others = place(key, lines), _others(error.message, key, lines)
    text = f"{where}: {error}" if where else str(error)
    return BadInput(f"{text} ({others})" if others else text) if where or others else error


def _others(message: str, key: str, lines: Mapping[str, str]) -> str:
    """Return "plan.sharding: run.yaml:4, ..." for the other written keys that a message names."""
    told = dict.fromkeys(k for k in _NAMED.findall(message) if k in lines and not f"{key}.".startswith(f"{k}."))
    return ", ".join(f"{k}: {lines[k]}" for k in told)


def place(key: str, lines: Mapping[str, str]) -> str:
    """Return the file:line of `key`, or else of a key in it, or else of the nearest key around it; else ""."""
    inside = next((where for k, where in lines.items() if key and k.startswith(f"{key}.")), "")
    if key not in lines and inside:
        return inside
    while key and key not in lines:
        key = key.rpartition(".")[0]
    return lines.get(key, "")


def _order(where: str) -> tuple[bool, int]:
    line = re.search(r":(\d+)$", where)
    return line is None, int(line.group(1)) if line else 0


@dataclass(frozen=True, slots=True)
class _Mistake:
    key: str
    said: str


def _mistake(item: ErrorDetails, values: Mapping[str, Any]) -> _Mistake:
    key, field, model = _locate(item["loc"])
    if item["type"] == "extra_forbidden":
        if now := earlier_names.key_now(key):
            return _Mistake(key, f"the key is {now} now: rename it, or run `gossamer config upgrade` on the file")
        name = str(item["loc"][-1])
        return _Mistake(key, f"there is no such key: {suggest(name, model)}")
    if item["type"] == "value_error" or field is None:
        said = item.get("ctx", {}).get("error", item["msg"])
        return _Mistake(key, f"{said}")
    return _wrong(key, field, _at(values, key))


def _wrong(key: str, field: FieldInfo, value: Any) -> _Mistake:
    default = _short(field.get_default(call_default_factory=True))
    do = f"write such a value, or leave the key out for its default, {default}"
    if section(field.annotation) is not None:
        do = "write keys below this section, indented, or leave the section out"
    elif is_text(field) and not isinstance(value, (list, dict)):
        do = f'quote it: "{_short(value)}"'
    got = "nothing" if value is None else repr(value) if isinstance(value, str) else _short(value)
    what = wanted(field) + (f" ({field.description})" if field.description else "")
    return _Mistake(key, bad_input(wanted=what, got=got, do=do).message)


def _short(value: Any) -> str:
    try:
        text = flow(value)
    except Exception:  # a value given from Python that YAML has no form for
        text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _locate(loc: tuple[int | str, ...]) -> tuple[str, FieldInfo | None, type[BaseModel]]:
    """Return the dotted key of an error, its field, and its section; errors deeper in a value belong to the field."""
    model: type[BaseModel] = RunConfig
    keys: list[str] = []
    field: FieldInfo | None = None
    for part in loc:
        if field is not None and section(field.annotation) is None:
            break
        field = model.model_fields.get(str(part))
        keys.append(str(part))
        model = (section(field.annotation) if field is not None else None) or model
    return ".".join(keys), field, model


def _at(values: Any, key: str) -> Any:
    for part in key.split("."):
        if isinstance(values, Mapping):
            values = values.get(part)
    return values


def _booleans(values: Mapping[str, Any]) -> Iterator[tuple[str, _Mistake]]:
    """Yield a mistake for every true or false where a number belongs: `steps: true` would be read as 1 step."""
    for key, field in leaves():
        value = _at(values, key) if isinstance(values.get(key.split(".")[0]), Mapping) else None
        if isinstance(value, bool) and "true" not in wanted(field) and not is_text(field):
            yield key, _wrong(key, field, value)


def suggest(name: str, model: type[BaseModel] = RunConfig) -> str:
    """Return a closing clause about an unknown key of `model`: the nearest in it, else the nearest anywhere."""
    here = list(model.model_fields)
    if difflib.get_close_matches(name, here, n=1, cutoff=0.6):
        return nearest(name, here)
    ends = {key.rpartition(".")[2] for key, _ in leaves()}
    close = {name} if name in ends else set(difflib.get_close_matches(name, ends, n=3, cutoff=0.7))
    elsewhere = [repr(key) for key, _ in leaves() if key.rpartition(".")[2] in close]
    if elsewhere:
        return f"did you mean {' or '.join(elsewhere)}?"
    return nearest(name, here)
