"""Iterators of the standard library: copies that will yield what the originals will, for an iterator only advances."""

from __future__ import annotations

import copy
import itertools
from types import GeneratorType
from typing import Any

_ITERATORS = (itertools.count, itertools.cycle, itertools.chain, itertools.islice, itertools.repeat)
_OF_CONTAINERS: tuple[type, ...] = (*map(type, (iter([]), iter(()), iter(range(0)), iter(""))), enumerate, zip)
_KNOWN = (*_ITERATORS, *_OF_CONTAINERS)


def is_iterator(held: Any) -> bool:
    """Return whether `held` is an iterator that can be copied."""
    return isinstance(held, _KNOWN)


def twin(iterator: Any) -> Any:
    """Return an iterator that will yield what this one will. A plain copy would share an inner iterator."""
    if not isinstance(iterator, (*_ITERATORS, enumerate, zip)):
        return copy.copy(iterator)
    reduced: Any = iterator.__reduce__()
    kind, given, *state = reduced
    made = kind(*map(_inner_twin, given))
    for one in state:
        made.__setstate__(tuple(map(_inner_twin, one)) if isinstance(one, tuple) else one)
    return made


def _inner_twin(held: Any) -> Any:
    if isinstance(held, _KNOWN):
        return twin(held)
    return copy.copy(held) if isinstance(held, list) else held


def is_unknown_iterator(held: Any) -> bool:
    """Return whether `held` is an iterator of an unknown kind."""
    kind = type(held)
    known = (*_KNOWN, GeneratorType)
    return hasattr(kind, "__next__") and kind.__module__ in ("builtins", "itertools") and not isinstance(held, known)
