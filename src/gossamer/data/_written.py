"""The short form of a method that takes one value: "text:corpus/*.txt" is {text: {files: corpus/*.txt}}."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar

from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.method_config import Written
from gossamer.spec.registry import Registry
from gossamer.spec.suggest import nearest

T = TypeVar("T")


def parse_written(room: Registry[T], written: Written, *, key: str) -> T:
    """Build the method that "name", "name:value" or {name: {...}} configures; `value` is the first field of the method.

    Raises BadInput for an unknown name, a value that is missing, or one that the method has no field for.
    """
    if not isinstance(written, str):
        return room.build(written, key=key)
    name, colon, value = written.partition(":")
    if name not in room.names():
        kind = room.package.rpartition(".")[2]
        raise BadInput(f"no {kind} is called {name!r}: {nearest(name, room.names())}", key=key)
    known: tuple[Field[Any], ...] = fields(room.type(name))  # type: ignore[arg-type]
    first = known[0].name if known else None
    if colon and first is None:
        raise bad_input(wanted=f"{name} without a value", got=repr(written), do=f"write {name} alone", key=key)
    needs = bool(known) and known[0].default is MISSING
    if needs and not value.strip():
        raise bad_input(
            wanted=f"{name}:{str(first).upper()}",
            got=repr(written),
            do=f"write the value of {first} after the colon",
            key=key,
        )
    return room.build({name: {first: value.strip()}} if value else name, key=key)
