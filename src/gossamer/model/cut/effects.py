"""What the call of a unit does in Python beside what it returns: attributes, arguments, globals, iterators.

Found in a trace, by comparing what Python holds before and after every call. What only the unit itself reads again is
nobody else's concern; where the model's code or another call may read it, ghosts have to do it as well: they run the
unit's forward as a shadow, on absent tensors (see `stage.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from gossamer.model.cut.tree import leaves_of
from gossamer.model.snapshot import GONE, Difference, Root, Snapshot

OF_TORCH = frozenset(vars(nn.Module())) | {"__dict__", "__class__", "forward"}
_NOT_STATE = (Tensor, nn.Module, type, type(lambda: None), type(print), type(nn.Module().train))
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
BEGINNING = -0.5  # code that runs before the first call


@contextmanager
def unseen() -> Iterator[None]:
    """What is done in here is not the model's doing."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():  # type: ignore[no-untyped-call]
        yield


@dataclass
class Reads:
    """Who reads which attribute of which module during a forward."""

    now: Callable[[], float]  # the number of the running call; between two of them, a number between theirs
    of: dict[Root, set[float]] = field(default_factory=dict)
    writers: dict[Root, set[float]] = field(default_factory=dict)
    put: set[float] = field(default_factory=set)  # when a tensor is assigned
    touched: set[Root] = field(default_factory=set)  # whatever lies there
    shared: dict[Root, tuple[Root, ...]] = field(default_factory=dict)  # attributes that hold the same object

    def know(self, module: nn.Module) -> None:
        """What modules share when the forward begins."""
        roots: dict[int, list[Root]] = {}
        for inner in module.modules():
            for name, held in vars(inner).items():
                if name not in OF_TORCH and not isinstance(held, (*_NOT_STATE, *_PLAIN)):
                    roots.setdefault(id(held), []).append((id(inner), name))
        self.shared = {root: tuple(group) for group in roots.values() if len(group) > 1 for root in group}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """In the forwards of all modules."""
        outer, assign = vars(nn.Module).get("__getattribute__"), nn.Module.__setattr__

        def read(module: nn.Module, name: str) -> Any:
            try:
                held = object.__getattribute__(module, name)
            except AttributeError:  # perhaps it is there later
                if not _is_registered(module, name):
                    self.of.setdefault((id(module), name), set()).add(self.now())
                raise
            if name not in OF_TORCH:
                self.touched.add((id(module), name))
            if name not in OF_TORCH and not isinstance(held, _NOT_STATE):
                self.of.setdefault((id(module), name), set()).add(self.now())
            return held

        def write(module: nn.Module, name: str, held: Any) -> None:
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
        """Whoever reads it beside a call."""
        roots = self.shared.get(root, (root,))
        return {reader for one in roots for reader in self.of.get(one, ())} - {call}


@dataclass
class Effects:
    """Of one call."""

    before: Snapshot
    found: list[Difference] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)  # that were left somewhere
    kept: frozenset[Root] = frozenset()  # attributes that are others now, or hold something else
    left: frozenset[str] = frozenset()  # outside of modules, where a tensor is now

    @staticmethod
    def begin(unit: nn.Module, path: str, given: Any) -> Effects:
        """A call is about to be made."""
        with unseen():
            return Effects(Snapshot.of_python(unit, path, given))

    def end(self) -> None:
        """It was made."""
        with unseen():
            changed = [*self.before.differences()]
            self.found = [one for one in changed if not (_is_of_tensors(one) and _is_followed(one))]
            self.kept = frozenset(one.root for one in changed if one.root is not None and one.root[1] not in OF_TORCH)
            self.left = frozenset(one.name for one in changed if one.root is None and _is_of_tensors(one))
            self.tensors = [x for one in changed for x in leaves_of(one.now) if isinstance(x, Tensor)]
        self.before = Snapshot()

    def outside(self, call: int, reads: Reads) -> Iterator[Difference]:
        """What others may read. Of what torch keeps in a module for itself nobody does."""
        for one in self.found:
            if one.root is None or (one.root[1] not in OF_TORCH and reads.others(one.root, call)):
                yield one


def _is_registered(module: nn.Module, name: str) -> bool:
    own = vars(module)
    return any(name in own.get(kind, ()) for kind in ("_parameters", "_buffers", "_modules"))


def _is_followed(one: Difference) -> bool:
    """Whether a ghost leaves the same tensors there: as an attribute, or in what it was given. How many lie in another
    list or dict others may ask.
    """
    if one.root is None:
        return one.name.startswith("its argument")
    return isinstance(one.now, Tensor | weakref.ref) and one.name.rpartition(".")[2] == one.root[1]


def _is_of_tensors(one: Difference) -> bool:
    """Whether tensors (or weak references to some) were added or put there, which are followed as tensors."""
    if one.now is one.before or one.now is GONE:
        return False
    leaves = [x() if isinstance(x, weakref.ref) else x for x in leaves_of(one.now)]
    return bool(leaves) and all(isinstance(x, Tensor) for x in leaves)
