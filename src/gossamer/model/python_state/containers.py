"""Containers: dicts, lists, sets, weak dictionaries, arrays, context variables, files in memory."""

from __future__ import annotations

import array
import collections
import contextvars
import io
import itertools
import pickle
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from gossamer.model.python_state.context_variables import read_variable
from gossamer.model.python_state.record import GONE, Difference, StateRecord, is_same
from gossamer.model.python_state.user_code import package_of

_WRITTEN_DOWN = frozenset(("decimal", "hashlib", "_hashlib"))


@dataclass(frozen=True)
class ContainerReader:
    """The reader of containers into `record`."""

    record: StateRecord

    def read(self, held: Any) -> Iterator[Any] | None:
        """Record how to restore the contents of `held`; return the objects in it, or None if it is not a container."""
        found: Iterator[Any] = iter(())
        if isinstance(held, dict):
            found = self._dict(held)
        elif isinstance(held, list | collections.deque):
            found = self._list(held)
        elif isinstance(held, set):
            found = self._set(held)
        elif isinstance(held, weakref.WeakKeyDictionary | weakref.WeakValueDictionary):
            found = self._weak(held)
        elif isinstance(held, weakref.WeakSet | weakref.ReferenceType):
            self.record.is_fleeting = True
        elif isinstance(held, contextvars.ContextVar):
            found = read_variable(held, self.record)
        elif isinstance(held, threading.local):
            found = iter((held.__dict__,))
        elif isinstance(held, io.StringIO | io.BytesIO):
            self._text(held)
        elif isinstance(held, bytearray | array.array):
            self._bytes(held)
        elif isinstance(held, tuple | frozenset):
            found = iter(held)
        elif isinstance(held, MappingProxyType):
            found = iter(held.values())
        elif isinstance(held, np.ndarray):
            found = self._array(held)
        else:
            return None
        return found

    def read_opaque(self, held: Any) -> None:
        """Note how to compare an object of a standard library's type: by file position, digest or pickled form."""
        if (isinstance(held, io.IOBase) or package_of(type(held)) in _WRITTEN_DOWN) and (
            said := _written_down(held)
        ) is not None:
            self.record.note_state(held, lambda: _written_down(held) != said)

    def _dict(self, held: dict[Any, Any]) -> Iterator[Any]:
        items = [(key, self.record.kept(value)) for key, value in held.items()]
        name, root = self.record.at
        is_attributes = root is not None and not root[1]
        holder = None if is_attributes else held
        for key, value in held.items():
            mine = root if not is_attributes else (root[0], str(key)) if root else None
            self.record.name(value, (f"{name}.{key}" if name else str(key), mine))

        def is_other() -> bool:
            return len(held) != len(items) or any(
                a is not c or b is not d for (a, b), (c, d) in zip(held.items(), items, strict=True)
            )

        def put_back() -> None:
            if is_other():
                kind = collections.OrderedDict if isinstance(held, collections.OrderedDict) else dict
                kind.clear(held)
                kind.update(held, items)

        def compare() -> Iterator[Difference]:
            was = dict(items)
            for key in [*held, *(key for key in was if key not in held)]:
                before, now = was.get(key, GONE), held.get(key, GONE)
                if not is_same(before, now):
                    mine = (root[0], str(key)) if is_attributes and root else root
                    yield Difference(f"{name}.{key}" if name else str(key), mine, before, now, holder)

        self.record.note_restore(put_back)
        self.record.note_comparison(compare, is_other)
        if isinstance(held, collections.defaultdict):
            yield held.default_factory
        yield from (value for _, value in items)

    def _list(self, held: Any) -> Iterator[Any]:
        items = [self.record.kept(value) for value in held]

        def is_other() -> bool:
            return len(held) != len(items) or any(a is not b for a, b in zip(held, items, strict=True))

        def put_back() -> None:
            if is_other():
                kind = list if isinstance(held, list) else collections.deque
                kind.clear(held)
                kind.extend(held, items)

        name, root = self.record.at

        def compare() -> Iterator[Difference]:
            for before, now in itertools.zip_longest(items, held, fillvalue=GONE):
                if not is_same(before, now):
                    yield Difference(f"{name} (a {type(held).__name__})", root, before, now, held)

        self.record.note_restore(put_back)
        self.record.note_comparison(compare, is_other)
        yield from items

    def _set(self, held: set[Any]) -> Iterator[Any]:
        items = set(held)
        which = {id(one) for one in items}

        def is_other() -> bool:
            return {id(one) for one in held} != which  # True equals 1

        def put_back() -> None:
            if is_other():
                held.clear()
                held.update(items)

        self.record.note_state(held, lambda: len(held) != len(items) or held != items)
        self.record.note_other(is_other)
        self.record.note_restore(put_back)
        yield from items

    def _weak(self, held: Any) -> Iterator[Any]:
        """Note how to restore a weak dictionary, and yield its values."""
        items = [*held.items()]

        def put_back() -> None:
            if not _are_same(items, [*held.items()]):
                held.clear()
                held.update(items)

        self.record.note_state(held, lambda: not _are_same(items, [*held.items()]))
        self.record.is_fleeting = True
        self.record.note_restore(put_back)
        yield from (value for _, value in items)

    def _text(self, held: Any) -> None:
        """Note how to restore a file in memory."""
        if held.closed:
            return
        file: Any = held
        state = file.__getstate__()

        def is_other() -> bool:
            return held.closed or bool(file.__getstate__() != state)

        def put_back() -> None:
            if is_other() and not held.closed:
                held.__setstate__(state)

        self.record.note_state(held, is_other)
        self.record.note_restore(put_back)

    def _bytes(self, held: Any) -> None:
        was = held[:]

        def is_other() -> bool:
            return bytes(held) != bytes(was)  # -0.0 is not 0.0

        def put_back() -> None:
            if is_other():
                held[:] = was

        self.record.note_state(held, is_other)
        self.record.note_restore(put_back)

    def _array(self, held: np.ndarray[Any, Any]) -> Iterator[Any]:
        was = held.copy()

        def put_back() -> None:
            if held.shape != was.shape and held.size == was.size:
                held.shape = was.shape
            if held.flags.writeable and held.shape == was.shape:
                held[...] = was

        self.record.note_state(held, lambda: held.shape != was.shape or held.tobytes() != was.tobytes())
        self.record.note_restore(put_back)
        return iter(was.flat) if was.dtype.hasobject else iter(())


def _are_same(before: Sequence[tuple[Any, Any]], now: Sequence[tuple[Any, Any]]) -> bool:
    """Return whether two dictionaries hold the same."""
    pairs = zip(before, now, strict=False)
    return len(before) == len(now) and all(a is c and is_same(b, d) for (a, b), (c, d) in pairs)


def _written_down(held: Any) -> Any:
    """Return a value that shows the state of an object; None if there is none."""
    if isinstance(held, io.IOBase):
        try:
            return held.tell()
        except (OSError, ValueError):
            return None
    if callable(digest := getattr(held, "hexdigest", None)):
        return digest()
    try:
        return pickle.dumps(held)
    except Exception:  # of whatever kind: its state cannot be compared
        return None
