"""Python side effects that a unit begins to have after the model was split.

The trace did not see them, so other stages do not reproduce them. Only units whose own code assigns something, or calls
a method that changes a container, are checked: after every call, on the stage that owns them. A unit whose code does
neither costs nothing.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from gossamer.model.python_state.record import Difference
from gossamer.model.snapshot import Snapshot
from gossamer.model.split.dataflow import DataFlow
from gossamer.model.split.python_effects import OF_TORCH, unseen
from gossamer.model.split.split_error import split_error

_STORES = frozenset(("STORE_ATTR", "STORE_GLOBAL", "STORE_SUBSCR", "STORE_DEREF", "DELETE_ATTR", "DELETE_SUBSCR"))
_CHANGES = frozenset(
    (
        "setattr", "append", "extend", "insert", "pop", "popleft", "appendleft", "remove", "clear", "add", "discard",
        "update", "setdefault", "popitem", "write", "send", "next", "set", "put", "get_nowait", "put_nowait",
        "random", "randint", "shuffle", "choice", "normal", "integers", "uniform",
    )
)  # fmt: skip
NOT_RUN = frozenset(("__init__", "__new__", "extra_repr", "reset_parameters", "__repr__", "__setstate__"))


def changes_python(unit: nn.Module) -> bool:
    """Return whether the user's code that can be found from a unit may change Python state."""
    found = Snapshot.of_python(unit, "")
    own = (held for held in found.found() if isinstance(held, FunctionType) and found.is_own(held))
    return any(changes(held.__code__) for held in own if held.__name__ not in NOT_RUN)


def changes(code: CodeType) -> bool:
    """Return whether a code object may change Python state."""
    stores = any(one.opname in _STORES for one in dis.get_instructions(code))
    return stores or not _CHANGES.isdisjoint(code.co_names) or any(map(changes, inner(code)))


def inner(code: CodeType) -> Iterator[CodeType]:
    """Return the code objects of the functions that `code` defines."""
    return (one for one in code.co_consts if isinstance(one, CodeType))


@dataclass
class LaterEffects:
    """A check of the units of one stage for Python side effects that the trace did not have."""

    module: nn.Module
    stage: int
    units: frozenset[str]  # that are checked
    _before: dict[int, Snapshot] = field(default_factory=dict)

    def begin(self, flow: DataFlow, number: int, given: Any) -> None:
        """Take a snapshot of Python state before unit call `number`."""
        call = flow.calls[number]
        if call.unit in self.units and not call.is_python:
            with unseen():
                self._before[number] = Snapshot.of_python(self.module.get_submodule(call.unit), call.unit, given)

    def end(self, flow: DataFlow, number: int) -> None:
        """Compare Python state after the call.

        Raises BadInput if the call changed state that others may read, and did not when it was traced.
        """
        before = self._before.pop(number, None)
        if before is None:
            return
        with unseen():
            began = next((one for one in before.differences() if self._is_new(flow, number, one)), None)
        if began is not None:
            raise split_error(
                wanted=f"{flow.calls[number].name} to change the same Python state in every forward, on stage "
                f"{self.stage}, as in the traced forward",
                got=f"a change of {began.name or 'a variable'}, which the traced forward did not change",
                do=lambda say: (
                    f"change it in the code between units, or set {say.cuts} so that one stage has the unit and "
                    "all code that reads it"
                ),
            )

    def _is_new(self, flow: DataFlow, number: int, one: Difference) -> bool:
        if one.root is None:
            return number not in flow.state.left.get(one.name, ())
        if one.root[1] in OF_TORCH:
            return False
        path = next((p for p, m in self.module.named_modules() if id(m) == one.root[0]), "") if one.root else ""
        key = f"{path}.{one.root[1]}" if path else one.root[1]
        others = flow.state.looked_into.get(key, frozenset()) - {number}
        return number not in flow.state.kept.get(key, ()) and bool(others)
