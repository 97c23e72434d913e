"""Checking the methods a configuration names: by their source (at once), or by building them (imports torch)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gossamer.settings.complain import DEFAULT, several
from gossamer.settings.resolve import Resolved, value_at
from gossamer.settings.rooms import Method, RoomPage, rooms
from gossamer.spec.choice import Choice
from gossamer.spec.errors import BadInput
from gossamer.spec.nearest import nearest
from gossamer.spec.rules import lines

ROOM_OF = {
    "data.source": "data/source",
    "data.tokenizer": "data/tokenizer",
    "train.optimizer": "optim",
    "train.schedule": "optim/rate",
    "plan.schedule": "pipeline/schedule",
    "plan.exchange": "compress",
    "plan.sync": "sync",
    "plan.states": "memory",
    "plan.adapt": "plan/adapt",
    "run.trackers": "view/tracker",
}


def check_names(resolved: Resolved) -> None:
    """Look every method and parameter up in the rooms' source; raises one BadInput with a line for each unknown."""
    known = rooms()

    _each(resolved, lambda room, written, key: _look_up(known, room, written, key))


def check_methods(resolved: Resolved) -> None:
    """Build every method the configuration names; raises one BadInput with a line for each that cannot be built.

    Data is looked up only: what its parameters are worth shows when it is read.
    """
    known = rooms()

    def build(room: str, written: Any, key: str) -> None:
        if room == "compress":
            importlib.import_module("gossamer.compress").rules(written, key=key)
        elif room.startswith("data/"):
            _look_up(known, room, written, key)
        else:
            importlib.import_module(f"gossamer.{room.replace('/', '.')}").ROOM.build(written, key=key)

    _each(resolved, build)


def _each(resolved: Resolved, check: Callable[[str, Any, str], None]) -> None:
    wrong = []
    for room, key, written in _choices(resolved):
        try:
            check(room, written, key)
        except BadInput as error:
            wrong.append(error)
    if wrong:
        raise several(wrong, _places(resolved))


def _places(resolved: Resolved) -> dict[str, str]:
    return {key: where.rpartition(", ")[2] for key, where in resolved.origin.items() if where != DEFAULT}


def _choices(resolved: Resolved) -> Iterator[tuple[str, str, Any]]:
    """(room, key, method as written) of all that is chosen; `auto` is the planner's to choose, `none` no method."""
    for key, room in ROOM_OF.items():
        value = value_at(resolved.config, key)
        if isinstance(value, list) and room != "compress":
            yield from ((room, f"{key}.{i}", each) for i, each in enumerate(value))
        elif value not in ("auto", "none"):
            yield room, key, value


def _look_up(known: Mapping[str, RoomPage], room: str, written: Any, key: str) -> None:
    if room == "compress":
        for line in lines(written, key=key):
            exact = line.level == "island" and Choice.parse(line.written, key=line.method_key).name == "dense"
            inside = line.level == "island" and not exact
            _look_up_one(known, known["compress/codec" if inside else room], line.written, line.method_key)
    else:
        _look_up_one(known, known[room], written, key)


def _look_up_one(known: Mapping[str, RoomPage], room: RoomPage, written: Any, key: str) -> None:
    if isinstance(written, str):
        written = written.partition(":")[0]  # text:GLOB, bpe:N
    choice = Choice.parse(written, key=key)
    try:
        method = room.method(choice.name)
    except BadInput as error:
        raise BadInput(error.message, key=key) from None
    key = f"{key}.{method.name}"
    names = {p.name: p for p in method.parameters}
    inner = _inner(known, method)
    given = dict(choice.parameters)
    if len(inner) == 1 and len(given) == 1 and not set(given) & set(names):
        given = {next(iter(inner)): given}  # as Room.build reads {error_feedback: {topk: {...}}}
    for name, value in given.items():
        if name not in names:
            raise BadInput(f"{method.name} has no parameter {name!r}: {nearest(name, names)}", key=f"{key}.{name}")
        if name in inner and value is not None:
            _look_up_one(known, inner[name], value, f"{key}.{name}")


def _inner(known: Mapping[str, RoomPage], method: Method) -> dict[str, RoomPage]:
    """Parameters that are themselves methods, of the room whose abstract class they are annotated with."""
    bases = {page.base: page for page in known.values()}
    kinds = {p.name: p.annotation.removesuffix(" | None") for p in method.parameters}
    return {name: bases[kind] for name, kind in kinds.items() if kind in bases}
