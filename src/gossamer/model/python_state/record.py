"""Record of Python state: how to restore it, and how to compare it with the present."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from gossamer.model.python_state.iterators import is_iterator, twin

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range, slice)

PutBack = Callable[[], None]
Root = tuple[int, str]  # a module, and its attribute
GONE: Any = type("Gone", (), {"__repr__": lambda _: "nothing"})()


@dataclass(frozen=True, slots=True)
class Difference:
    """A change of Python state: an attribute, element or generator differs.

    `root`: the module attribute that holds it, if any.
    """

    name: str
    root: Root | None
    before: Any
    now: Any  # the present value; the same object as `before` if its inner state changed
    holder: Any = None  # the object that holds it; None: the module itself, a class, a global or a closure


@dataclass
class StateRecord:
    """A record of the state found so far. `at`: path and module attribute of the object that is being read."""

    at: tuple[str, Root | None] = ("", None)
    seen: dict[int, Any] = field(default_factory=dict)  # by id; held, so that no id is given twice
    paths: dict[int, tuple[str, Root | None]] = field(default_factory=dict)  # path and attribute of each object found
    is_fleeting: bool = False  # it can be restored only once, or would keep alive what lives only as long as others do
    _put_back: list[PutBack] = field(default_factory=list)
    _compare: list[Callable[[], Iterator[Difference]]] = field(default_factory=list)
    _is_other: list[Callable[[], bool]] = field(default_factory=list)
    _copied: dict[int, Any] = field(default_factory=dict)  # iterators

    def put_back(self) -> None:
        """Restore the state: the same objects in the same places."""
        for one in self._put_back:
            one()

    def differences(self) -> Iterator[Difference]:
        """Yield the differences to the present. An iterator that does not show its state counts as advanced."""
        for one in self._compare:
            yield from one()

    def is_current(self) -> bool:
        """Return whether the present state is known to be the recorded one, down to the order in dicts.

        False where that cannot be told, or where the record is fleeting.
        """
        return not self.is_fleeting and not any(is_other() for is_other in self._is_other)

    def name(self, held: Any, at: tuple[str, Root | None]) -> None:
        """Note the path and module attribute of an object, unless it was found elsewhere before."""
        self.paths.setdefault(id(held), at)

    def note_restore(self, put_back: PutBack) -> None:
        """Note how to restore a piece of state."""
        self._put_back.append(put_back)

    def note_comparison(self, compare: Callable[[], Iterator[Difference]], is_other: Callable[[], bool]) -> None:
        """Note how to compare a piece of state; `is_other` is for `is_current`."""
        self._compare.append(compare)
        self._is_other.append(is_other)

    def note_other(self, is_other: Callable[[], bool]) -> None:
        """Note how to tell for `is_current` that a piece of state is another, which is no difference by itself."""
        self._is_other.append(is_other)

    def note_state(self, held: Any, is_other: Callable[[], bool]) -> None:
        """Note that the inner state of `held` differs from now where `is_other` says so."""
        name, root = self.at

        def compare() -> Iterator[Difference]:
            if is_other():
                yield Difference(f"{name} (a {type(held).__name__})", root, held, held, held)

        self.note_comparison(compare, is_other)

    def note_value(self, name: str, was: Any, now: Callable[[], Any], holder: Any = None) -> None:
        """Note that `name` of the present object has the value `was`, to compare with the value `now`."""
        owner, root = self.at

        def compare() -> Iterator[Difference]:
            if not is_same(was, found := now()):
                yield Difference(f"{owner}.{name}" if owner else name, root, was, found, holder)

        self.note_comparison(compare, lambda: not is_same(was, now()))

    def kept(self, value: Any) -> Any:
        """Return the value to restore: itself, or a copy of an iterator, which only advances."""
        if not is_iterator(value):
            return value
        if id(value) not in self._copied:
            self.seen[id(value)] = value
            self._copied[id(value)] = twin(value)
            self.is_fleeting = True
            self.note_advance(value)
        return self._copied[id(value)]

    def note_advance(self, value: Any) -> None:
        """Compare an iterator by whether it has advanced."""
        outer, self.at = self.at, self.paths.get(id(value), self.at)
        if isinstance(value, itertools.count):
            said = repr(value)
            self.note_state(value, lambda: repr(value) != said)
        else:
            left = operator.length_hint(value, -1)
            self.note_state(value, lambda: left < 0 or operator.length_hint(value, -1) != left)
        self.at = outer


def is_same(before: Any, now: Any) -> bool:
    """Return whether two values are the same: one object, or equal plain values. Iterators are compared elsewhere."""
    if before is now or (is_iterator(before) and type(before) is type(now)):
        return True
    if not isinstance(before, PLAIN) or type(before) is not type(now):
        return False
    if isinstance(before, float | complex | range | slice):  # -0.0 is not 0.0, nor range(0, 3, 2) range(0, 4, 2)
        return repr(before) == repr(now)
    return before == now


def is_plain(held: Any) -> bool:
    """Return whether a value has no state. An object of a subclass, as of `str`, may have attributes."""
    return isinstance(held, PLAIN) and not hasattr(held, "__dict__")
