"""The conversion of a configuration file to the present names, in its own text: comments and order stay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from gossamer.settings.read import read_yaml
from gossamer.settings.yaml_io import Loader
from gossamer.spec.earlier_names import ALL_LEVELS, KEYS, LEVELS, PARAMETERS, VALUES
from gossamer.spec.errors import BadInput
from gossamer.spec.upgrade import configuration, earlier_methods, is_method_key

_MOVED = "plan.microbatches"  # the one key that has moved to another section
_NUMBERS = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("bool", "int", "float"))


@dataclass(frozen=True, slots=True)
class Rename:
    """A rename in a text: one name that is another one now; `start` and `end` are its characters."""

    start: int
    end: int
    line: int
    old: str
    new: str


def upgraded(text: str, name: str) -> tuple[str, tuple[Rename, ...]]:
    """Return a YAML configuration under the present names, and what was renamed; `name` is the file's, for errors.

    Raises BadInput for a text that is no configuration in YAML, and for one that has to be changed by hand.
    """
    before = read_yaml(text, name).values
    root = yaml.compose(text, Loader)
    found = tuple(sorted(set(_of_section(root, "")), key=lambda one: one.start)) if root is not None else ()
    moved = next((one for one in found if one.new == KEYS[_MOVED]), None)
    if moved is not None:
        raise BadInput(
            f"{name}:{moved.line}: {_MOVED} is {KEYS[_MOVED]} now: move the key to the section "
            f"{KEYS[_MOVED].partition('.')[0]}, then run `gossamer config upgrade` again"
        )
    for one in reversed(found):
        text = text[: one.start] + one.new + text[one.end :]
    after = read_yaml(text, name).values
    assert after == configuration(before), "internal error, please report: the text and its values differ"
    return text, found


def upgrade_file(file: Path) -> tuple[Rename, ...]:
    """Convert a configuration file in place, completely or not at all; return what was renamed.

    Raises BadInput as `upgraded` does, and for a file that is not YAML.
    """
    if file.suffix == ".toml":
        do = "rename by hand the keys that `gossamer config check` reports"
        raise BadInput(f"{file}: only YAML and JSON files can be converted, not TOML: {do}")
    try:
        text = file.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise BadInput(f"there is no file {file}: give the configuration file to convert") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"cannot read {file}: {error}: give a YAML file") from None
    now, found = upgraded(text, str(file))
    if found:
        beside = file.with_name(f".{file.name}.upgraded")
        beside.write_bytes(now.encode("utf-8"))
        beside.replace(file)
    return found


def _of_section(node: yaml.Node, above: str) -> Iterator[Rename]:
    for key, value in _pairs(node):
        now = KEYS.get(f"{above}{key.value}", f"{above}{key.value}")
        own = now.removeprefix(above)
        if own != key.value:
            yield _rename(key, own)
        if is_method_key(now):
            yield from _of_methods(value, earlier_methods(now))
        elif now in ("train", "train.verify", "machines", "plan"):
            yield from _of_section(value, f"{now}.")
        elif isinstance(value, yaml.ScalarNode) and value.value in VALUES.get(now, {}):
            yield _rename(value, VALUES[now][value.value])


def _of_methods(node: yaml.Node, methods: Mapping[str, str]) -> Iterator[Rename]:
    """Yield the renames in a method, in a list of methods, or in lines of [pattern, level, method]."""
    if not isinstance(node, yaml.SequenceNode):
        yield from _of_method(node, methods, {})
        return
    level = node.value[1] if len(node.value) == 3 else None
    if isinstance(level, yaml.ScalarNode) and level.value in ALL_LEVELS:
        if level.value in LEVELS:
            yield _rename(level, LEVELS[level.value])
        yield from _of_method(node.value[2], methods, {})
    else:
        for one in node.value:
            yield from _of_methods(one, methods)


def _of_method(node: yaml.Node, methods: Mapping[str, str], names: Mapping[str, str]) -> Iterator[Rename]:
    if isinstance(node, yaml.ScalarNode) and node.value in methods:
        yield _rename(node, methods[node.value])
    for one in node.value if isinstance(node, yaml.SequenceNode) else ():  # candidates
        yield from _of_method(one, methods, {})
    for key, value in _pairs(node):
        kept = key.value if value.tag in _NUMBERS else methods.get(key.value, key.value)  # zero1: {whole: true}
        now = names.get(key.value, kept)
        if now != key.value:
            yield _rename(key, now)
        yield from _of_method(value, methods, PARAMETERS.get(now, {}))


def _pairs(node: yaml.Node) -> Iterator[tuple[yaml.ScalarNode, yaml.Node]]:
    if isinstance(node, yaml.MappingNode):
        yield from ((key, value) for key, value in node.value if isinstance(key, yaml.ScalarNode))


def _rename(node: yaml.ScalarNode, new: str) -> Rename:
    """Return the rename of a scalar, inside its quotes if it has any."""
    quoted = 1 if node.style in ("'", '"') else 0
    start, end = node.start_mark.index + quoted, node.end_mark.index - quoted
    return Rename(start, end, node.start_mark.line + 1, str(node.value), new)
