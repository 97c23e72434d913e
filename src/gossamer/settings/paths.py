"""Absolute paths for a configuration that was written in one folder and is read in another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gossamer.settings.overrides import COMMAND_LINE
from gossamer.settings.resolve import Resolved, value_at
from gossamer.settings.yaml_io import flow

_PLAIN = ("model.hf", "model.gguf", "data.cache", "run.directory")
_METHODS = ("data.source", "data.tokenizer")
_OF_FILES = ("text", "jsonl", "parquet", "hf", "chat", "pairs")
_FIELDS = ("files", "directory", "template")


def anchored(resolved: Resolved, folder: Path) -> Resolved:
    """Return `resolved` with the relative paths of the command line made absolute, as seen from `folder`."""
    for key in (*_PLAIN, *_METHODS):
        where, value = resolved.origin.get(key, ""), value_at(resolved.config, key)
        if COMMAND_LINE not in where or value is None:
            continue
        named = key == "model.hf" and not (folder / str(value)).exists()  # a model type, or one in the local cache
        absolute = _of_method(value, folder) if key in _METHODS else value if named else _absolute(value, folder)
        if absolute != value:
            resolved = resolved.replace(key, absolute, origin=where)
    where, sources = resolved.origin.get("data.validation", ""), resolved.config.data.validation_sources
    if COMMAND_LINE in where and sources:
        written = resolved.config.data.validation
        assert isinstance(written, Mapping)
        found = {name: _of_method(each, folder) if name in sources else each for name, each in written.items()}
        resolved = resolved.replace("data.validation", found, origin=where)
    return resolved


def written_overrides(given: Iterable[str] | Mapping[str, Any]) -> list[str]:
    """Return overrides as the command line takes them, from ["train.steps=5"] or {"train.steps": 5}."""
    if isinstance(given, Mapping):
        return [f"{key}={flow(value)}" for key, value in given.items()]
    return [given] if isinstance(given, str) else list(given)


def _of_method(written: Any, folder: Path) -> Any:
    """Return a source or tokenizer with absolute paths: "text:GLOB", {text: GLOB} or {text: {files: GLOB}}."""
    if isinstance(written, str):
        name, colon, path = written.partition(":")
        if colon and name == "hub":
            return f"{name}:{_of_hub(path.strip(), folder)}"
        return f"{name}:{_absolute(path.strip(), folder)}" if colon and name in _OF_FILES else written
    name, inner = next(iter(written.items()))
    if name == "mixture" and isinstance(inner, Mapping) and isinstance(inner.get("sources"), Mapping):
        sources = {each: _of_method(source, folder) for each, source in inner["sources"].items()}
        return {name: {**inner, "sources": sources}}
    if name == "hub" and isinstance(inner, Mapping):
        folder_of_it = {"dataset": _of_hub(inner.get("dataset"), folder)}
        read = {"read": _of_method(inner["read"], folder)} if isinstance(inner.get("read"), Mapping) else {}
        return {name: {**inner, **folder_of_it, **read}}
    if name not in _OF_FILES:
        return written
    if isinstance(inner, str):
        return {name: _absolute(inner, folder)}
    return {name: {k: _absolute(v, folder) if k in _FIELDS else v for k, v in (inner or {}).items()}}


def _of_hub(name: Any, folder: Path) -> Any:
    """Return the absolute path of a local folder; a name on the hub as it is."""
    return _absolute(name, folder) if isinstance(name, str) and (folder / name).is_dir() else name


def _absolute(path: Any, folder: Path) -> Any:
    if not isinstance(path, str) or path.startswith("~"):
        return path
    return str(folder / path)
