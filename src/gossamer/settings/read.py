"""The reader of configuration files: their values, and the line of every key."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gossamer.settings.yaml_io import Loader
from gossamer.spec.errors import BadInput
from gossamer.spec.suggest import nearest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SUFFIXES = (".yaml", ".yml", ".toml", ".json")


@dataclass(frozen=True, slots=True)
class ParsedFile:
    """The values of a configuration file, and their places: `lines` maps a dotted key to "run.yaml:12"."""

    values: Mapping[str, Any]
    lines: Mapping[str, str]


def read(path: Path) -> ParsedFile:
    """Read a configuration file; raises BadInput where it is missing, unreadable, no YAML (or TOML), or has a key
    twice.
    """
    text = _text(path)
    if path.suffix == ".toml":
        return _toml(text, str(path))
    return read_yaml(text, str(path))


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        raise BadInput(_missing(path)) from None
    except IsADirectoryError:
        raise BadInput(f"{path} is a folder: give the configuration file in it") from None
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not UTF-8 text (byte {error.start}): give a YAML or TOML file") from None
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}: give a configuration file that can be read") from None


def _missing(path: Path) -> str:
    folder = path.parent
    if "=" in path.name:
        return f"there is no file {path}: the configuration file comes first, then key=value"
    if not folder.is_dir():
        return f"there is no file {path}: the folder {folder} does not exist: correct the path"
    beside = [p.name for p in folder.iterdir() if p.suffix in SUFFIXES and p.name != "pyproject.toml"]
    none = "its folder has no configuration file (.yaml, .yml, .toml or .json): give the path of one"
    return f"there is no file {path}: {nearest(path.name, beside) if beside else none}"


def read_yaml(text: str, name: str) -> ParsedFile:
    """Parse a YAML text; its places are `name`:line. Raises BadInput as `read` does."""
    try:
        loader = Loader(text)
        root = loader.get_single_node()
        if root is None or root.tag == "tag:yaml.org,2002:null":
            return ParsedFile({}, {})
        if not isinstance(root, yaml.MappingNode):
            raise BadInput(f"{_place(name, root)}: wanted keys such as `train:`, got {_kind(root)}")
        duplicates = list(_duplicates(root, name, ()))
        if duplicates:
            raise BadInput("\n".join(duplicates))
        values = loader.construct_document(root)
        return ParsedFile(values, dict(_lines(root, name, "")))
    except yaml.MarkedYAMLError as error:
        raise BadInput(_malformed(error, name)) from None
    except (yaml.YAMLError, ValueError) as error:
        if isinstance(error, BadInput):
            raise
        raise BadInput(f"{name} is not YAML: {' '.join(str(error).split())}") from None


def _malformed(error: yaml.MarkedYAMLError, name: str) -> str:
    mark = error.problem_mark or error.context_mark
    said = error.problem or error.context or "cannot be read"
    hint = ": indent with spaces, not tabs" if "\\t" in said else ""
    return f"{name}:{mark.line + 1 if mark else 1}: this is not YAML: {said}{hint}"


def _duplicates(node: yaml.Node, name: str, above: tuple[yaml.Node, ...]) -> Iterator[str]:
    """Yield one line for every key written twice in one mapping (YAML would silently keep the last)."""
    if node in above:
        raise BadInput(f"{_place(name, node)}: this contains itself: write the value out instead of using an alias")
    children = []
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, yaml.Node] = {}
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                first = seen.setdefault(key.value, key)
                if first is not key:
                    line = first.start_mark.line + 1
                    yield f"{_place(name, key)}: {key.value} is written twice (first in line {line}): keep one"
            children.append(value)
    elif isinstance(node, yaml.SequenceNode):
        children = node.value
    for child in children:
        yield from _duplicates(child, name, (*above, node))


def _lines(node: yaml.Node, name: str, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, yaml.MappingNode):
        for inner, value in node.value:
            if isinstance(inner, yaml.ScalarNode):
                dotted = f"{key}.{inner.value}" if key else inner.value
                yield dotted, _place(name, inner)
                yield from _lines(value, name, dotted)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield f"{key}.{index}", _place(name, value)
            yield from _lines(value, name, f"{key}.{index}")


def _place(name: str, node: yaml.Node) -> str:
    return f"{name}:{node.start_mark.line + 1}"


def _kind(node: yaml.Node) -> str:
    return "a list" if isinstance(node, yaml.SequenceNode) else f"only {node.value!r}"


_TABLE = re.compile(r"^\s*\[+\s*([\w.\- ]+?)\s*\]+\s*(#.*)?$")
_KEY = re.compile(r"^\s*([\w.-]+)\s*=")


def _toml(text: str, name: str) -> ParsedFile:
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"{name} is not TOML: {error}") from None
    lines: dict[str, str] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), 1):  # the parser keeps no places; keys stand at line starts
        if header := _TABLE.match(line):
            table = header.group(1)
            lines.setdefault(table, f"{name}:{number}")
        elif key := _KEY.match(line):
            lines.setdefault(f"{table}.{key.group(1)}" if table else key.group(1), f"{name}:{number}")
    return ParsedFile(values, lines)
