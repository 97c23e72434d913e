"""What the call of a unit does in Python beside what it returns: attributes, arguments, globals, iterators.

Found in a trace, by comparing what Python holds before and after every call. What only the unit itself reads again is
nobody else's concern; where the model's code or another call may read it, ghosts have to do it as well: they run the
unit's forward as a shadow, on absent tensors (see `stage.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from gossamer.model.cut.tree import leaves_of
from gossamer.model.snapshot import GONE, Difference, Root, Snapshot

OF_TORCH = frozenset(vars(nn.Module())) | {"__dict__", "__class__", "forward"}
_NOT_STATE = (Tensor, nn.Module, type, type(lambda: None), type(print), type(nn.Module().train))
BEGINNING = -0.5  # code that runs before the first call


@dataclass
class Reads:
    """Who reads which attribute of which module during a forward."""

    now: Callable[[], float]  # the number of the running call; between two of them, a number between theirs
    of: dict[Root, set[float]] = field(default_factory=dict)
    writers: dict[Root, set[float]] = field(default_factory=dict)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """In the forwards of all modules."""
        outer, assign = vars(nn.Module).get("__getattribute__"), nn.Module.__setattr__

        def read(module: nn.Module, name: str) -> Any:
            held = object.__getattribute__(module, name)
            if name not in OF_TORCH and not isinstance(held, _NOT_STATE):
                self.of.setdefault((id(module), name), set()).add(self.now())
            return held

        def write(module: nn.Module, name: str, held: Any) -> None:
            self.writers.setdefault((id(module), name), set()).add(self.now())
            assign(module, name, held)

        nn.Module.__getattribute__ = read  # type: ignore[method-assign]
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
        return self.of.get(root, set()) - {call}


@dataclass
class Effects:
    """Of one call."""

    before: Snapshot
    found: list[Difference] = field(default_factory=list)

    @staticmethod
    def begin(unit: nn.Module, path: str, given: Any) -> Effects:
        """A call is about to be made."""
        with _disable_current_modes():  # type: ignore[no-untyped-call]
            return Effects(Snapshot.of_python(unit, path, given))

    def end(self) -> None:
        """It was made."""
        with _disable_current_modes():  # type: ignore[no-untyped-call]
            self.found = [one for one in self.before.differences() if not _is_of_tensors(one)]
        self.before = Snapshot()

    def outside(self, call: int, reads: Reads) -> Iterator[Difference]:
        """What others may read. Of what torch keeps in a module for itself nobody does."""
        for one in self.found:
            if one.root is None or (one.root[1] not in OF_TORCH and reads.others(one.root, call)):
                yield one


def _is_of_tensors(one: Difference) -> bool:
    """Whether tensors were added or put there, which are followed as tensors."""
    if one.now is one.before or one.now is GONE:
        return False
    leaves = leaves_of(one.now)
    return bool(leaves) and all(isinstance(x, Tensor) for x in leaves)
