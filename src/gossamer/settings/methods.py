"""Checks of the methods a configuration names: by their source (at once), or by building them (imports torch)."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from pydantic.fields import FieldInfo

from gossamer.settings.catalog import Category, Method, categories
from gossamer.settings.describe import leaves
from gossamer.settings.resolve import Resolved, value_at
from gossamer.settings.validation_errors import DEFAULT, several
from gossamer.spec.errors import BadInput
from gossamer.spec.method_config import MethodConfig, category_of
from gossamer.spec.parameter_rules import lines
from gossamer.spec.short_form import ShortForm

_OPEN = ("auto", "none")  # words that stand for no method, where a key takes them


@cache
def _rooms() -> Mapping[str, Category]:
    return categories()


def check_names(resolved: Resolved) -> None:
    """Look every method and parameter up in the categories' source; raises one BadInput, a line per unknown name."""
    known = _rooms()

    _each(resolved, lambda room, written, key: _look_up(known, room, written, key))


def check_methods(resolved: Resolved) -> None:
    """Build every method the configuration names; raises one BadInput with a line for each that cannot be built.

    Data sources and tokenizers are looked up only: errors in their parameters appear when the data are read.
    """
    known = _rooms()

    def build(room: str, written: Any, key: str) -> None:
        if room == "exchange":
            importlib.import_module("gossamer.recipe").ParameterRules.read(written, key=key)
        elif room.startswith("data/"):
            _look_up(known, room, written, key)
        else:
            importlib.import_module(f"gossamer.{room.replace('/', '.')}").REGISTRY.build(written, key=key)

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
    """Yield (category, key, method as written) of the chosen methods; `auto` (left to the planner) and `none` are
    omitted.
    """
    for key, field in leaves():
        room, value = category_of(field), value_at(resolved.config, key)
        if not room:
            continue
        if isinstance(value, list) and room != "exchange":
            yield from ((room, f"{key}.{i}", each) for i, each in enumerate(value))
        elif not (value in _OPEN and (value == field.default or f"{value}" in _words_of(field))):
            yield room, key, value
    for name, source in resolved.config.data.validation_sources.items():
        yield "data/source", f"data.validation.{name}", source


def _words_of(field: FieldInfo) -> list[str]:
    return re.findall(r"\w+", field.description or "")


def _look_up(known: Mapping[str, Category], room: str, written: Any, key: str) -> None:
    if room == "exchange":
        for line in lines(written, key=key):
            exact = line.level == "intra" and MethodConfig.parse(line.written, key=line.method_key).name == "dense"
            inside = line.level == "intra" and not exact
            _look_up_one(known, known["exchange/codec" if inside else room], line.written, line.method_key)
    else:
        _look_up_one(known, known[room], written, key)


def _look_up_one(known: Mapping[str, Category], room: Category, written: Any, key: str) -> None:
    if isinstance(written, str) and room.name.startswith("data/"):
        written = written.partition(":")[0]  # text:GLOB, bpe:N
    choice = MethodConfig.parse(written, key=key)
    try:
        method = room.method(choice.name)
    except BadInput as error:
        raise BadInput(error.message, key=key) from None
    key = f"{key}.{method.name}"
    inner = _inner(known, method)
    form = ShortForm(
        known=[p.name for p in method.parameters],
        inner={name: tuple(page.methods) for name, page in inner.items()},
        needed=[p.name for p in method.parameters if p.name in inner and p.default is None],
    )
    given = form.spelled_out(choice.parameters)
    if (unknown := form.unknown(given, method=method.name)) is not None:
        name, near = unknown
        raise BadInput(f"{method.name} has no parameter {name!r}: {near}", key=f"{key}.{name}")
    for name, value in given.items():
        if name in inner and value is not None:
            _look_up_one(known, inner[name], value, f"{key}.{name}")


def _inner(known: Mapping[str, Category], method: Method) -> dict[str, Category]:
    """Return the parameters that are themselves methods, each with the category of its annotated base class."""
    bases = {page.base: page for page in known.values()}
    kinds = {p.name: p.annotation.removesuffix(" | None") for p in method.parameters}
    return {name: bases[kind] for name, kind in kinds.items() if kind in bases}
