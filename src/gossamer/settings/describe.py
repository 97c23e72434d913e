"""Types and values of the configuration in plain words: for error messages and for the reference."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from gossamer.spec.config import RunConfig

_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
_LINES = ", or a list [...] of [parameter pattern, level, method]"
_LISTED = ", or a list [...] of methods"
_PLAIN = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def wanted(field: FieldInfo) -> str:
    """Return the values that a field takes, in words: "a whole number >= 1 or auto"."""
    return _words(field.annotation, tuple(field.metadata))


def section(annotation: Any) -> type[BaseModel] | None:
    """Return the model class if the annotation is a section of the configuration; None otherwise."""
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


@functools.cache
def leaves(model: type[BaseModel] = RunConfig, prefix: str = "") -> tuple[tuple[str, FieldInfo], ...]:
    """Return every dotted key that holds a value (and no further keys of the schema), with its field, in order."""
    found: list[tuple[str, FieldInfo]] = []
    for name, field in model.model_fields.items():
        inner = section(field.annotation)
        found += [(prefix + name, field)] if inner is None else leaves(inner, f"{prefix}{name}.")
    return tuple(found)


def is_text(field: FieldInfo) -> bool:
    """Return whether the field takes text (or null) alone."""
    return set(_members(field.annotation)) <= {str, type(None)}


def takes_text(field: FieldInfo) -> bool:
    """Return whether the field takes text, perhaps among other types."""
    return str in _members(field.annotation)


def is_method(annotation: Any) -> bool:
    """Return whether the annotation is `spec.method_config.Written`: a name, or a name with parameters."""
    found = set(map(str, _members(annotation)))
    return {str(str), str(dict[str, Any])} <= found


def _several(annotation: Any) -> str:
    """Return the words for the lists that a method's annotation takes besides one method; "" if it takes none."""
    lists = [get_args(member)[0] for member in _members(annotation) if get_origin(member) is list]
    if not lists:
        return ""
    return _LISTED if is_method(lists[0]) else _LINES


def _members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _words(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _words(args[0], args[1:])
    if is_method(annotation):
        return "a method: a name or {name: {parameter: value}}" + _several(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(_words(a) for a in args if a is not type(None))
    if origin is Literal:
        return " or ".join(map(str, args)) if len(args) < 3 else f"one of {', '.join(map(str, args))}"
    if origin is list:
        return f"a list [...] of {_plural(_words(args[0]))}"
    if origin is dict or annotation is dict:
        return "keys with values {...}"
    inner = section(annotation)
    if inner is not None:
        return f"keys ({', '.join(inner.model_fields)})"
    return " ".join([_PLAIN.get(annotation, str(annotation)), " and ".join(_bounds(metadata))]).strip()


def _plural(words: str) -> str:
    for one, many in (("a whole number", "whole numbers"), ("a number", "numbers"), ("a method:", "methods:")):
        words = words.replace(one, many)
    return words


def _bounds(metadata: Iterable[Any]) -> Iterator[str]:
    for item in metadata:
        if isinstance(item, FieldInfo):
            yield from _bounds(item.metadata)
        for name, sign in _BOUNDS.items():
            bound = getattr(item, name, None) if type(item).__name__.lower() == name else None
            if bound is not None:
                yield f"{sign} {bound}"
