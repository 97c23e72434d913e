"""Python side effects of a unit call besides its return value: on attributes, arguments, globals, iterators.

A trace finds them by comparing Python state before and after every call. State that only the unit itself reads again
matters to no other stage. If the model's code or another call may read it, placeholders have to reproduce it: they run
the unit's forward on absent tensors, a shadow run (see `unit_calls.py`).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from gossamer.model.python_state.record import GONE, Difference, Root
from gossamer.model.snapshot import Snapshot
from gossamer.model.split.object_paths import reachable_ids, ways_to
from gossamer.model.split.pytree import leaves_of

OF_TORCH = frozenset(vars(nn.Module())) | {"__dict__", "__class__", "forward"}
_NOT_STATE = (nn.Module, type, type(lambda: None), type(print), type(nn.Module().train))
_FUNCTIONS = (type(lambda: None), type(print), type(nn.Module().train))
BEGINNING = -0.5  # code that runs before the first call


@contextmanager
def unseen() -> Iterator[None]:
    """Run the code in this context outside of all torch modes, so that no trace takes it for the model's."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():  # type: ignore[no-untyped-call]
        yield


@dataclass
class Reads:
    """A record of the module attributes, tensors or not, that unit calls and code between them read and set."""

    now: Callable[[], float]  # the number of the running call; between two of them, a number between theirs
    of: dict[Root, set[float]] = field(default_factory=dict)
    writers: dict[Root, set[float]] = field(default_factory=dict)
    put: set[float] = field(default_factory=set)  # when a tensor is assigned
    touched: set[Root] = field(default_factory=set)  # read or set, of any type
    renewed: set[Root] = field(default_factory=set)  # set by the forward before any read

    def late(self) -> Iterator[tuple[Root, float]]:
        """Yield the attributes that a forward may read as the one before left them, with the position of their last
        write.
        """
        for root, writers in self.writers.items():
            if root not in self.renewed and root[1] not in OF_TORCH:
                yield root, max(writers)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record the attribute reads and writes of all modules in this context."""
        outer, assign = vars(nn.Module).get("__getattribute__"), nn.Module.__setattr__

        def read(module: nn.Module, name: str) -> Any:
            try:
                held = object.__getattribute__(module, name)
            except AttributeError:  # it may exist later
                if not _is_registered(module, name):
                    self.of.setdefault((id(module), name), set()).add(self.now())
                raise
            if name not in OF_TORCH:
                self.touched.add((id(module), name))
            if name == "__dict__" and not _caller().startswith(("torch.", "gossamer.")):  # vars(): perhaps all of them
                for one in held:
                    self.of.setdefault((id(module), one), set()).add(self.now())
            if name not in OF_TORCH and (not isinstance(held, _NOT_STATE) or _is_own_function(module, name, held)):
                self.of.setdefault((id(module), name), set()).add(self.now())
            return held

        def write(module: nn.Module, name: str, held: Any) -> None:
            if (id(module), name) not in self.of:
                self.renewed.add((id(module), name))
            self.writers.setdefault((id(module), name), set()).add(self.now())
            self.touched.add((id(module), name))
            if isinstance(held, Tensor):
                self.put.add(self.now())
            assign(module, name, held)

        nn.Module.__getattribute__ = read  # type: ignore[method-assign,assignment]
        nn.Module.__setattr__ = write  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            nn.Module.__setattr__ = assign  # type: ignore[method-assign]
            if outer is None:
                del nn.Module.__getattribute__
            else:
                nn.Module.__getattribute__ = outer  # type: ignore[method-assign]

    def others(self, root: Root, call: int) -> set[float]:
        """Return the readers of the attribute `root` except `call`."""
        return self.of.get(root, set()) - {call}


@dataclass
class PythonEffects:
    """The Python side effects of one unit call, the attributes that lead to them, and the tensors it stored."""

    before: Snapshot
    found: list[Difference] = field(default_factory=list)
    ways: list[frozenset[Root | None]] = field(default_factory=list)  # to each of `found`; None: of no module
    tensors: list[Tensor] = field(default_factory=list)  # that the call stored
    kept: frozenset[Root] = frozenset()  # attributes that were set or whose content changed
    left: frozenset[str] = frozenset()  # names outside of modules that hold a new tensor

    @staticmethod
    def begin(unit: nn.Module, path: str, given: Any) -> PythonEffects:
        """Take a snapshot of Python state before a call of `unit`."""
        with unseen():
            return PythonEffects(Snapshot.of_python(unit, path, given))

    def end(self, module: nn.Module, given: Any, until: Any) -> None:
        """Compare Python state after the call: find what differs, and from where it can be read.

        It may be read from `module`, or from the functions that run up to the one with the code `until`. Tensors put
        into the arguments `given` are followed as tensors.
        """
        with unseen():
            changed = [one for one in self.before.differences() if one.root is None or one.root[1] not in OF_TORCH]
            self.tensors = [x for one in changed for x in leaves_of(one.now) if isinstance(x, Tensor)]
            self.kept = frozenset(one.root for one in changed if one.root is not None)
            self.left = frozenset(one.name for one in changed if one.root is None and _is_of_tensors(one))
            handed = reachable_ids(given) if any(map(_is_of_tensors, changed)) else set()
            self.found = [one for one in changed if not _is_of_tensors(one) or id(one.holder) not in handed]
            inside = {id(one.holder) for one in self.found if one.root is not None and one.holder is not None}
            ways = ways_to(inside, module, OF_TORCH, until) if inside else {}
            self.ways = [ways.get(id(one.holder), frozenset()) | {one.root} for one in self.found]
        self.before = Snapshot()

    def outside(self, call: int, reads: Reads, followed: Collection[Root]) -> Iterator[Difference]:
        """Yield the differences that code outside of `call` may read, but attributes that are `followed` as tensors."""
        for one, ways in zip(self.found, self.ways, strict=True):
            is_followed = one.root in followed and one.holder is None
            if not is_followed and any(way is None or reads.others(way, call) for way in ways):
                yield one


def _caller() -> str:
    return str(sys._getframe(2).f_globals.get("__name__", ""))


def _is_own_function(module: nn.Module, name: str, held: Any) -> bool:
    """Return whether a function is kept as an attribute, and may hold state that other code changes."""
    return isinstance(held, _FUNCTIONS) and name in object.__getattribute__(module, "__dict__")


def _is_registered(module: nn.Module, name: str) -> bool:
    own = vars(module)
    return any(name in own.get(kind, ()) for kind in ("_parameters", "_buffers", "_modules"))


def _is_of_tensors(one: Difference) -> bool:
    """Return whether only tensors (or weak references to some) were added or stored, which are followed as tensors."""
    if one.now is one.before or one.now is GONE:
        return False
    leaves = [x() if isinstance(x, weakref.ref) else x for x in leaves_of(one.now)]
    return bool(leaves) and all(isinstance(x, Tensor) for x in leaves)
