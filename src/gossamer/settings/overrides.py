"""key=value on the command line: `train.batch=32`, `plan.exchange.topk.fraction=0.01`, `train={steps: 5, batch: 8}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from gossamer.settings.describe import is_method, is_text, leaves, section, takes_text, wanted
from gossamer.settings.read import ParsedFile
from gossamer.settings.yaml_io import Loader, flow
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput
from gossamer.spec.method_config import MethodConfig

COMMAND_LINE = "command line"


def put_written(written: ParsedFile, given: str) -> ParsedFile:
    """Return `written` with one key=value of the command line applied; raises BadInput for text of another form."""
    key, equals, text = given.partition("=")
    key = key.strip().removeprefix("--")
    if not equals or not all(key.split(".")):
        raise BadInput(f"command line: wanted key=value such as train.batch=32, got {given!r}: write key, =, value")
    return put(written, key, _parse(text, _field(key), given), COMMAND_LINE)


def put(written: ParsedFile, key: str, value: Any, where: str) -> ParsedFile:
    """Return a copy of a parsed configuration in which `key` ("train.batch") has `value`.

    where: the origin of the value ("run.yaml:3", "command line"). A section is changed key by key.
    """
    field = _field(key)
    if field is not None and section(field.annotation) is not None and isinstance(value, Mapping):
        for name, inner in value.items():  # a section is changed key by key, never replaced
            written = put(written, f"{key}.{name}", inner, where)
        return written
    values = _put(written.values, RunConfig, key, "", value)
    own = _speaks_for(written.values, values, key)
    lines = {k: v for k, v in written.lines.items() if not f"{k}.".startswith(f"{own}.")}
    return ParsedFile(values, {**lines, key: where, own: where})


def _speaks_for(before: Mapping[str, Any], after: Mapping[str, Any], key: str) -> str:
    """Return the key whose origin changes: the field's own if an override in it chose another method, else `key`."""
    for leaf, field in leaves():
        if key.startswith(f"{leaf}.") and is_method(field.annotation):
            old = _get(before, leaf, field.get_default(call_default_factory=True))
            new = _get(after, leaf, None)
            same = isinstance(old, Mapping) and isinstance(new, Mapping) and set(old) == set(new)
            return key if same or (isinstance(old, str) and old in (new or {})) else leaf
    return key


def _get(values: Any, key: str, default: Any) -> Any:
    for part in key.split("."):
        values = values.get(part) if isinstance(values, Mapping) else None
    return default if values is None else values


def _parse(text: str, field: FieldInfo | None, given: str) -> Any:
    try:
        value = yaml.load(text, Loader)
    except yaml.YAMLError as error:
        if field is not None and takes_text(field) and text.strip()[:1] not in "[{\"'":
            return text  # data.source=*.txt: an alias to YAML, a name to people
        raise BadInput(f"command line: {given!r} is not YAML: {getattr(error, 'problem', error)}: quote it") from None
    plain = field is not None and is_text(field) and value is not None and not isinstance(value, (list, dict))
    return text if plain and not isinstance(value, str) else value  # run.name=7


def _field(key: str) -> FieldInfo | None:
    """Return the field at a dotted key of the schema; None for a key that is deeper, or unknown."""
    model: type[BaseModel] | None = RunConfig
    field: FieldInfo | None = None
    for part in key.split("."):
        field = model.model_fields.get(part) if model is not None else None
        if field is None:
            return None
        model = section(field.annotation)
    return field


def _put(node: Any, model: type[BaseModel], key: str, above: str, value: Any) -> dict[str, Any]:
    name, _, rest = key.partition(".")
    here = f"{above}{name}"
    node = {} if node is None else node
    if not isinstance(node, Mapping):
        section_key = above.rstrip(".")
        do = f"write keys below {section_key}, indented, in the configuration file"
        raise BadInput(f"command line: {above}{key} cannot be set: {section_key} holds {node!r} instead of keys: {do}")
    if not rest:
        return {**node, name: value}
    field = model.model_fields.get(name)
    if field is None:
        return {**node, name: _into({}, rest.split("."), value)}  # unknown: the check says so
    inner = section(field.annotation)
    if inner is not None:
        return {**node, name: _put(node.get(name), inner, rest, f"{here}.", value)}
    current = node.get(name, field.get_default(call_default_factory=True))
    return {**node, name: _inside(here, field, current, rest.split("."), value)}


def _inside(key: str, field: FieldInfo, current: Any, rest: list[str], value: Any) -> Any:
    """Return the new value of a schema field after one change below it."""
    if is_method(field.annotation):
        return _into_method(current, rest, value)
    if isinstance(current, Mapping):
        return _into(current, rest, value)
    example = flow(field.get_default(call_default_factory=True))
    raise BadInput(f"command line: {key} has no keys below it, it takes {wanted(field)}: write {key}={example}")


def _into_method(current: Any, path: list[str], value: Any) -> dict[str, Any]:
    """Return the method with one parameter changed; a method other than the current one starts from its defaults."""
    name, *rest = path
    try:
        choice = MethodConfig.parse(current)
    except BadInput:
        choice = MethodConfig(name)
    parameters = choice.parameters if choice.name == name else {}
    return {name: _into(parameters, rest, value) if rest else value}


def _into(node: Any, path: list[str], value: Any) -> dict[str, Any]:
    name, *rest = path
    node = {node: {}} if isinstance(node, str) else node if isinstance(node, Mapping) else {}
    return {**node, name: _into(node.get(name), rest, value) if rest else value}
