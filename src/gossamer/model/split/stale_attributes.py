"""Attributes that units of other stages change for their own use.

In the trace nothing else read them, so they are not followed, and on this stage they have old values. A read of one in
a later forward, or in a backward, raises BadInput. The modules of such units get a subclass whose descriptors raise at
such a read. Other modules have no cost.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any, NoReturn

from torch import Tensor, nn

from gossamer.model.snapshot import Snapshot
from gossamer.model.split.dataflow import FIRST, KEPT, DataFlow, UnitCall
from gossamer.model.split.later_effects import NOT_RUN, changes, inner
from gossamer.model.split.python_effects import OF_TORCH

AttributePlaces = tuple[tuple[nn.Module, frozenset[str]], ...]
_PLAIN = (bool, int, float, complex, str, bytes, type(None), Tensor, nn.Module, type, FunctionType)


@dataclass
class StaleAttributes:
    """The module attributes that have old values on one stage. `refuse` raises the error for an attribute's name."""

    module: nn.Module
    refuse: Callable[[str], NoReturn]
    is_on: bool = False  # whether model code runs on this stage
    _names: dict[int, set[str]] = field(default_factory=dict)  # by id of the module, which is held here
    _kinds: dict[tuple[type, frozenset[str]], type] = field(default_factory=dict)
    _of_flows: dict[int, tuple[DataFlow, dict[int, AttributePlaces]]] = field(default_factory=dict)

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Check attribute reads in this context."""
        was, self.is_on = self.is_on, True
        try:
            yield
        finally:
            self.is_on = was

    def passed(self, flow: DataFlow, number: int) -> None:
        """Mark the attributes that unit call `number` of another stage changes: this stage did not make that change."""
        for module, names in self._places(flow, number):
            self._names[id(module)] |= names

    def ended(self, flow: DataFlow, at: int) -> None:
        """Mark the attributes that the calls from `at` on change: the forward of this stage ended before them."""
        for number in range(at, flow.end):
            self.passed(flow, number)
        for late in flow.state.late:
            path, _, name = late.name.rpartition(".")
            if late.after == FIRST and late.written >= at and (found := _module(self.module, path)) is not None:
                self._guard(found, frozenset((name,)))
                self._names[id(found)].add(name)

    def holds(self, module: nn.Module, name: str) -> bool:
        """Return whether an attribute has an old value while reads are checked."""
        return self.is_on and name in self._names.get(id(module), ())

    def renew(self, module: nn.Module, name: str) -> None:
        """Unmark an attribute: this stage has set it."""
        self._names.get(id(module), set()).discard(name)

    def path(self, module: nn.Module, name: str) -> str:
        """Return the path of an attribute from the root module."""
        found = next((path for path, one in self.module.named_modules() if one is module), "")
        return f"{found}.{name}" if found else name

    def _places(self, flow: DataFlow, number: int) -> AttributePlaces:
        _, known = self._of_flows.setdefault(id(flow), (flow, {}))
        if number not in known:
            known[number] = tuple(_places(self.module, flow, number))
            for module, names in known[number]:
                self._guard(module, names)
        return known[number]

    def _guard(self, module: nn.Module, names: frozenset[str]) -> None:
        if id(module) not in self._names:
            self._names[id(module)] = set()
        kind, missing = type(module), frozenset(n for n in names if not isinstance(_of_class(type(module), n), _Guard))
        if not missing:
            return
        if (kind, missing) not in self._kinds:
            told = {name: _Guard(name, self) for name in missing}
            same = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
            self._kinds[kind, missing] = type(kind.__name__, (kind,), {**same, **told})
        module.__class__ = self._kinds[kind, missing]


class _Guard:
    """A descriptor for a module attribute that raises if its value is old, and else returns it."""

    def __init__(self, name: str, stale: StaleAttributes) -> None:
        self.name, self.stale = name, stale

    def __get__(self, module: nn.Module | None, kind: type) -> Any:
        if module is not None and self.stale.holds(module, self.name):
            self.stale.refuse(self.stale.path(module, self.name))
        if module is not None and self.name in vars(module):
            return vars(module)[self.name]
        held = _of_class(kind, self.name)
        if held is self:
            raise AttributeError(self.name)
        return held.__get__(module, kind) if hasattr(type(held), "__get__") else held

    def __set__(self, module: nn.Module, held: Any) -> None:
        self.stale.renew(module, self.name)
        hidden = _of_class(type(module), self.name)
        if hidden is not self and hasattr(type(hidden), "__set__"):  # a property
            hidden.__set__(module, held)
        else:
            vars(module)[self.name] = held

    def __delete__(self, module: nn.Module) -> None:
        self.stale.renew(module, self.name)
        del vars(module)[self.name]


def _of_class(kind: type, name: str) -> Any:
    """Return the class attribute of that name; behind a guard the one it hides, or the guard if there is none."""
    held = [vars(base)[name] for base in kind.__mro__ if name in vars(base)]
    hidden = [one for one in held if not isinstance(one, _Guard)]
    return (hidden or held or [None])[0]


def _module(module: nn.Module, path: str) -> nn.Module | None:
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


def _places(module: nn.Module, flow: DataFlow, number: int) -> Iterator[tuple[nn.Module, frozenset[str]]]:
    """Yield modules, and their attributes that a unit changes for its own use: it sets them, and alone reads them."""
    call = flow.calls[number]
    followed = {f"{i.module}.{i.attribute}" for i in call.insides if i.attribute and i.container != KEPT}
    kept = [name for name, at in flow.state.kept.items() if number in at and name not in followed]
    for path, one in module.named_modules():
        mine = {name.removeprefix(f"{path}." if path else "") for name in kept if name.rpartition(".")[0] == path}
        if path == call.unit or path.startswith(f"{call.unit}.") or not call.unit:
            mine |= {name for name in _set_by(one) if not _is_read(flow, call, f"{path}.{name}" if path else name)}
        if mine:
            yield one, frozenset(mine)


def _is_read(flow: DataFlow, call: UnitCall, name: str) -> bool:
    readers = flow.state.looked_into.get(name, frozenset())
    return any(r != int(r) or r < 0 or flow.calls[int(r)].unit != call.unit for r in readers) or any(
        f"{i.module}.{i.attribute}" == name and i.container != KEPT for i in call.insides
    )


def _set_by(module: nn.Module) -> Iterator[str]:
    """Yield the names of attributes that the user's code of a module's class assigns, or may change otherwise."""
    found, names = Snapshot(), set[str]()
    functions = [one for kind in type(module).__mro__ for one in vars(kind).values() if isinstance(one, FunctionType)]
    for one in functions:
        if found.is_own(one) and one.__name__ not in NOT_RUN and changes(one.__code__):
            names |= {*_names(one.__code__, vars(module))}
    held = (module._parameters, module._buffers, module._modules)
    registered = {name for one in held for name in one.keys()}  # noqa: SIM118  scripted modules have no other way
    yield from names - OF_TORCH - registered


def _names(code: CodeType, held: Mapping[str, Any]) -> Iterator[str]:
    for one in dis.get_instructions(code):
        is_set = one.opname in ("STORE_ATTR", "DELETE_ATTR")
        if is_set or (isinstance(one.argval, str) and one.argval in held and not isinstance(held[one.argval], _PLAIN)):
            yield str(one.argval)
    for lower in inner(code):
        yield from _names(lower, held)
