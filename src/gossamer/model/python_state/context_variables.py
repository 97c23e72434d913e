"""Context variables, which Python cannot unset."""

from __future__ import annotations

import contextvars
import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gossamer.model.python_state.record import GONE, StateRecord
from gossamer.spec.errors import bad_input


@contextmanager
def context_kept() -> Iterator[None]:
    """Restore context variables on exit, also those that had no value, which Python cannot unset."""
    inner = ctypes.py_object(contextvars.copy_context())
    ctypes.pythonapi.PyContext_Enter(inner)
    try:
        yield
    finally:
        ctypes.pythonapi.PyContext_Exit(inner)


def read_variable(held: contextvars.ContextVar[Any], record: StateRecord) -> Iterator[Any]:
    """Note in `record` how to restore a context variable, and yield its value."""
    was = held.get(GONE)

    def put_back() -> None:
        if (now := held.get(GONE)) is was:
            return
        if was is GONE and now is not GONE:  # Python cannot make it unset again
            raise bad_input(
                wanted=f"the context variable {held.name} to have a value before the forward, which sets it",
                got="none",
                do="give the variable a default, or set it in the constructor of the model",
                key="model",
            )
        held.set(was)

    record.at = f"the context variable {held.name}", None
    record.note_value("", was, lambda: held.get(GONE))
    record.note_restore(put_back)
    if was is not GONE:
        record.name(was, record.at)
        yield was
