"""Random generators besides torch's that the code of a module may draw from, found by reading it, without running it.

Keying Python's generator costs more than torch's, so it is done only if a forward may need it. Code that a forward can
reach is followed by name: functions it calls, methods of its module and of the objects that the module holds. A name
with several meanings is followed in all of them. So code may be reported that never draws, which costs time alone.
Not found: code behind containers or `getattr`, and generators of one's own (`numpy.random.default_rng()`).
"""

from __future__ import annotations

import dis
import functools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from torch import nn

PYTHON, NUMPY = "random", "numpy"  # the generators of the modules with these names
_OWN = sys.stdlib_module_names | {"torch", "numpy", "scipy"}  # they draw from torch's generator, or when asked by name


def draws(module: nn.Module, *names: str) -> tuple[frozenset[str], ...]:
    """Return, for each named module with all modules in it, which of PYTHON and NUMPY their forwards may draw from."""
    read: dict[frozenset[Any], frozenset[str]] = {}  # blocks of one kind are read once
    found = []
    for name in names:
        inside = list(module.get_submodule(name).modules())
        kind = frozenset((type(m), *(getattr(f, "__code__", None) for f in _held(m))) for m in inside)
        if kind not in read:
            read[kind] = _read(inside)
        found.append(read[kind])
    return tuple(found)


def _read(modules: Sequence[nn.Module]) -> frozenset[str]:
    reader = _CodeReader()
    for module in modules:
        reader.follow(getattr(type(module), "forward", None), module)  # torch.jit modules have no code to read
        for held in _held(module):
            reader.follow(held, module)
    reader.read()
    return frozenset(reader.found)


def _held(module: nn.Module) -> list[Any]:
    """Return the functions that a module keeps: its own forward, an activation, a function that it was given."""
    return [held for held in vars(module).values() if isinstance(held, FunctionType | MethodType | functools.partial)]


@dataclass
class _CodeReader:
    found: set[str] = field(default_factory=set)
    _seen: set[tuple[type, CodeType]] = field(default_factory=set)
    _waiting: list[tuple[FunctionType, Any]] = field(default_factory=list)

    def follow(self, called: Any, owner: Any) -> None:
        """Queue the code of `called`, if it has some; `owner` is the object in which its methods are found."""
        if isinstance(called, staticmethod | classmethod):
            called = called.__func__
        elif isinstance(called, property):
            called = called.fget
        elif isinstance(called, functools.partial):
            called = called.func
        if isinstance(called, MethodType):
            called, owner = called.__func__, called.__self__
        if not isinstance(called, FunctionType):
            return
        at = type(owner), called.__code__
        if at not in self._seen and (called.__module__ or "").partition(".")[0] not in _OWN:
            self._seen.add(at)
            self._waiting.append((called, owner))

    def read(self) -> None:
        while self._waiting and len(self.found) < 2:
            function, owner = self._waiting.pop()
            names = frozenset(_names(function.__code__))
            self._note(function, names)
            self.follow(getattr(function, "__wrapped__", None), owner)
            for held in _closed_over(function):
                self.follow(held, owner)
            for name in names:
                self._follow_name(function, name, names, owner)

    def _note(self, function: FunctionType, names: frozenset[str]) -> None:
        for name in names:
            held = function.__globals__.get(name)
            if held is random or getattr(held, "__self__", None) is _PYTHON_INSTANCE:
                self.found.add(PYTHON)
            if held is np.random or getattr(held, "__self__", None) is _NUMPY_INSTANCE:
                self.found.add(NUMPY)
            if held is np and "random" in names:
                self.found.add(NUMPY)
        if any(name.partition(".")[0] in (PYTHON, NUMPY) for name in names):
            self.found.update(_imported(function.__code__))

    def _follow_name(self, function: FunctionType, name: str, names: frozenset[str], owner: Any) -> None:
        held = function.__globals__.get(name)
        self.follow(held, None)
        if isinstance(held, ModuleType) and held.__name__.partition(".")[0] not in _OWN:
            for inner in names & vars(held).keys():
                self.follow(vars(held)[inner], None)
        if isinstance(held, type):
            for method in names & vars(held).keys() | {"__init__", "__call__"}:
                self.follow(vars(held).get(method), held)
        for kind in _kinds(owner):
            self.follow(vars(kind).get(name), owner)


_PYTHON_INSTANCE: Any = random.random.__self__  # type: ignore[attr-defined]
_NUMPY_INSTANCE: Any = np.random.rand.__self__  # type: ignore[attr-defined]


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _imported(code: CodeType) -> Iterator[str]:
    """Yield the generators that the function itself imports."""
    for step in dis.get_instructions(code):
        if step.opname == "IMPORT_NAME":
            yield from (name for name in (PYTHON, NUMPY) if str(step.argval).partition(".")[0] == name)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _imported(inner)


def _closed_over(function: FunctionType) -> Iterator[Callable[..., Any]]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue


def _kinds(owner: Any) -> Iterator[type]:
    """Yield the classes in which a name on `owner`, or on an object that it holds, may be a method."""
    if owner is None:
        return
    yield from (owner if isinstance(owner, type) else type(owner)).__mro__
    if isinstance(owner, nn.Module):
        for held in vars(owner).values():
            if type(held).__module__.partition(".")[0] not in _OWN | {"builtins"}:
                yield from type(held).__mro__
