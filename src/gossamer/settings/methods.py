"""Checking the methods a configuration names: by their source (at once), or by building them (imports torch)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

from gossamer.settings.complain import DEFAULT, several
from gossamer.settings.resolve import Resolved, value_at
from gossamer.settings.rooms import Method, RoomPage, rooms
from gossamer.spec.choice import Choice
from gossamer.spec.errors import BadInput
from gossamer.spec.nearest import nearest

ROOM_OF = {
    "data.source": "data/source",
    "data.tokenizer": "data/tokenizer",
    "train.optimizer": "optim",
    "train.schedule": "optim/rate",
    "plan.schedule": "pipeline/schedule",
    "plan.exchange": "compress",
    "plan.sync": "sync",
    "run.trackers": "view/tracker",
}


def check_names(resolved: Resolved) -> None:
    """Look every method and parameter up in the rooms' source; raises one BadInput with a line for each unknown."""
    known = rooms()

    _each(resolved, lambda room, written, key: _look_up(known[room], written, key))


def check_methods(resolved: Resolved) -> None:
    """Build every method the configuration names; raises one BadInput with a line for each that cannot be built.

    Data is looked up only: what its parameters are worth shows when it is read.
    """
    known = rooms()

    def build(room: str, written: Any, key: str) -> None:
        if room.startswith("data/"):
            return _look_up(known[room], written, key)
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
    """(room, key, method as written) of everything the configuration chooses; `auto` is the planner's to choose."""
    for key, room in ROOM_OF.items():
        value = value_at(resolved.config, key)
        if isinstance(value, list):
            yield from ((room, f"{key}.{i}", each) for i, each in enumerate(value))
        elif value != "auto":
            yield room, key, value


def _look_up(room: RoomPage, written: Any, key: str) -> None:
    if isinstance(written, str):
        written = written.partition(":")[0]  # text:GLOB, bpe:N
    choice = Choice.parse(written, key=key)
    try:
        method = room.method(choice.name)
    except BadInput as error:
        raise BadInput(error.message, key=key) from None
    key = f"{key}.{method.name}"
    names = {p.name: p for p in method.parameters}
    inner = _inner(room, method)
    given = dict(choice.parameters)
    if len(inner) == 1 and len(given) == 1 and not set(given) & set(names):
        given = {inner[0]: given}  # as Room.build reads {error_feedback: {topk: {...}}}
    for name, value in given.items():
        if name not in names:
            raise BadInput(f"{method.name} has no parameter {name!r}: {nearest(name, names)}", key=f"{key}.{name}")
        if name in inner:
            _look_up(room, value, f"{key}.{name}")


def _inner(room: RoomPage, method: Method) -> list[str]:
    """Parameters that are themselves methods of the room."""
    return [p.name for p in method.parameters if p.annotation == room.base]
