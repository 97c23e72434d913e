"""Code: functions, classes and their attributes, and the globals and enclosing variables that functions name."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import BuiltinMethodType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

from gossamer.model.python_state.record import GONE, StateRecord
from gossamer.model.python_state.user_code import UserCode, names_in


@dataclass(frozen=True)
class CodeReader:
    """The reader of what the user's `code` names into `record`."""

    record: StateRecord
    code: UserCode

    def read(self, held: Any) -> Iterator[Any] | None:
        """Return the objects that a function, method or class leads to; None for any other object."""
        found: Iterator[Any]
        if isinstance(held, FunctionType):
            found = self._function(held)
        elif isinstance(held, MethodType):
            found = iter((held.__self__, held.__func__))
        elif isinstance(held, functools.partial):
            found = iter((held.func, held.args, held.keywords))
        elif isinstance(held, BuiltinMethodType) and not isinstance(held.__self__, ModuleType):
            found = iter((held.__self__,))
        elif isinstance(held, staticmethod | classmethod):
            found = iter((held.__func__,))
        elif isinstance(held, property):
            found = iter((held.fget, held.fset))
        elif isinstance(held, type):
            found = self._class(held)
        else:
            return None
        return found

    def _class(self, held: type) -> Iterator[Any]:
        for kind in held.__mro__:
            if not self.code.is_code(sys.modules.get(kind.__module__), kind.__module__):
                continue
            was = {n: self.record.kept(x) for n, x in vars(kind).items() if not n.startswith("__")}
            self.record.note_restore(functools.partial(_restore_class, kind, was))
            self.record.note_other(functools.partial(_has_more, kind, was))
            self.record.at = f"the class {kind.__qualname__}", None
            for name, value in was.items():
                self.record.note_value(name, value, functools.partial(vars(kind).get, name, GONE))
            yield from was.values()
            yield from (x for n, x in vars(kind).items() if n.startswith("__") and isinstance(x, FunctionType))

    def _function(self, held: FunctionType) -> Iterator[Any]:
        if not self.code.is_code(sys.modules.get(held.__module__ or ""), held.__module__ or ""):
            return
        for name in ("__defaults__", "__kwdefaults__"):
            given = getattr(held, name)
            self.record.note_restore(functools.partial(setattr, held, name, given))
            self.record.note_other(functools.partial(_is_another, held, name, given))
            yield given
        yield held.__dict__
        for cell in held.__closure__ or ():
            try:
                was = self.record.kept(cell.cell_contents)
            except ValueError:  # not filled yet
                self.record.note_restore(functools.partial(_empty, cell))
                self.record.note_other(functools.partial(_is_filled, cell))
                continue
            self.record.note_restore(functools.partial(setattr, cell, "cell_contents", was))
            self.record.at = f"a variable around {held.__qualname__}", None
            self.record.name(was, self.record.at)
            self.record.note_value("", was, functools.partial(_content, cell))
            yield was
        names, space = frozenset(names_in(held.__code__)), held.__globals__
        yield from self._named(names, space)
        for module in [space[name] for name in names & space.keys() if isinstance(space[name], ModuleType)]:
            if self.code.is_code(module, module.__name__):
                yield from self._named(names, vars(module))

    def _named(self, names: frozenset[str], space: dict[str, Any]) -> Iterator[Any]:
        """Yield the globals that code may change."""
        missing = object()
        for name in sorted(names):
            if isinstance(value := space.get(name, missing), ModuleType):
                continue
            was = self.record.kept(value)
            self.record.note_restore(functools.partial(_restore_global, space, name, was, missing))
            self.record.at = "the global", None
            self.record.note_value(name, GONE if was is missing else was, functools.partial(space.get, name, GONE))
            self.record.name(was, (f"the global {name}", None))
            if was is not missing:
                yield was


def _is_another(held: Any, name: str, was: Any) -> bool:
    return getattr(held, name) is not was


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet, or deleted
        return GONE


def _is_filled(cell: CellType) -> bool:
    return _content(cell) is not GONE


def _empty(cell: CellType) -> None:
    if _is_filled(cell):
        del cell.cell_contents


def _has_more(kind: type, was: Mapping[str, Any]) -> bool:
    return any(name not in was and not name.startswith("__") for name in vars(kind))


def _restore_class(kind: type, was: Mapping[str, Any]) -> None:
    for name in [n for n in vars(kind) if not n.startswith("__") and n not in was]:
        delattr(kind, name)
    for name, value in was.items():
        if vars(kind).get(name) is not value:
            setattr(kind, name, value)


def _restore_global(space: dict[str, Any], name: str, was: Any, missing: object) -> None:
    if was is missing:
        space.pop(name, None)
    elif space.get(name) is not was:
        space[name] = was
