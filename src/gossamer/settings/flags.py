"""Flags as other programs take them (`--steps 3`), translated into key=value overrides (train.steps=3)."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from gossamer.settings.describe import leaves
from gossamer.spec.earlier_names import KEYS

_CLOSE = 0.8


def as_overrides(option: str, value: str) -> list[str]:
    """Return the overrides that a flag may have meant: "--batch-size" and "8" -> ["train.batch=8"]; empty: none."""
    name = option.lstrip("-").replace("-", "_").lower()
    keys = _keys(name)
    return [f"{key}={value or 'VALUE'}" for key in keys]


def _keys(name: str) -> list[str]:
    known = dict.fromkeys(_known())
    around = next((key for key in known if name == key or name.startswith(f"{key}.")), None)
    if around is not None:  # also a parameter of a method: train.optimizer.sgd.lr
        return [name]
    ends: dict[str, list[str]] = {}
    for earlier, key in (*((key, key) for key in known), *KEYS.items()):
        ends.setdefault(earlier.rpartition(".")[2], []).append(key)
    last = name.rpartition(".")[2]
    if last in ends:
        return ends[last]
    close = difflib.get_close_matches(last, ends, n=1, cutoff=_CLOSE)
    words = [word for word in last.split("_") if word in ends]  # batch_size, num_steps
    return ends[(close or words)[0]] if close or words else []


def _known() -> Iterator[str]:
    """Yield every key, and every parameter of a method that is a default: train.optimizer.adamw.lr."""
    for key, field in leaves():
        yield key
        yield from _inside(key, field.get_default(call_default_factory=True))


def _inside(key: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield f"{key}.{name}"
            yield from _inside(f"{key}.{name}", inner)
