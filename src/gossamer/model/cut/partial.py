"""Building only a part: the user's own constructor runs, and parameters that are not wanted never hold memory.

A parameter is replaced by a fake tensor at the moment it is registered; what initialises it afterwards costs nothing.
At most one unwanted parameter exists at a time. Random numbers do not depend on what is wanted: each random operation
of the constructor is keyed by its parameter (see `origin/_seeded.py`), and the same ones happen on a fake tensor. Not
so on the meta device, which some initialisers ask about and then draw nothing.

Which parameter has which name is known only when the constructor is over, so there are two passes: `Skeleton.of`
without any parameter, and `Skeleton.build` with those of one stage.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode

from gossamer.model.cut.flow import hollow
from gossamer.model.snapshot import Snapshot
from gossamer.spec.errors import RunFailed

Build = Callable[[], nn.Module]


@dataclass(frozen=True)
class Skeleton:
    """A model without its parameters' storage, and the order in which its constructor makes them."""

    module: nn.Module  # runs: its parameters are zeros that take no memory
    order: dict[str, int]  # canonical name -> number of the registration

    @staticmethod
    def of(build: Build) -> Skeleton:
        """Run `build` once; the same one every time, as `Origin.build` is for one seed."""
        numbers = _Numbers(frozenset())
        with _watching(numbers):
            module = build()
        order = {name: numbers.number(p) for name, p in module.named_parameters()}
        _fill(module)
        return Skeleton(module, order)

    def build(self, build: Build, holds: frozenset[str]) -> nn.Module:
        """`build` again, with memory for the parameters named in `holds` alone; the others are zeros without."""
        numbers = _Numbers(frozenset(self.order[name] for name in holds if name in self.order))
        with _watching(numbers):
            module = build()
        if {name: numbers.number(p) for name, p in module.named_parameters()} != self.order:
            raise RunFailed("the model is built in another order every time: build it from its seed alone")
        _fill(module)
        return module


def hollowed(module: nn.Module) -> nn.Module:
    """A copy of a module whose parameters are zeros without memory. What it keeps of a graph is kept without it."""
    blanks: dict[int, object] = {
        id(p): nn.Parameter(
            hollow(tuple(p.shape), p.dtype, torch.device("cpu"), fill=0.0), requires_grad=p.requires_grad
        )
        for p in module.parameters()
    }
    for tensor in Snapshot.of(module).tensors:
        if not tensor.is_leaf:  # deepcopy refuses these
            blanks[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return copy.deepcopy(module, blanks)  # type: ignore[arg-type]


@dataclass
class _Numbers:
    """Parameters in the order they are first registered."""

    wanted: frozenset[int]
    mode: FakeTensorMode = field(default_factory=lambda: FakeTensorMode(allow_non_fake_inputs=True))
    count: int = 0
    made: dict[int, tuple[nn.Parameter, int]] = field(default_factory=dict)  # by id: what was registered, its number
    given: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = field(default_factory=dict)  # -> instead of it

    def register(self, _: nn.Module, __: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        """What is registered instead; None: the parameter itself."""
        if parameter is None:
            return None
        if id(parameter) in self.made:
            return parameter
        before = self.given.get(id(parameter))
        if before is not None and before[0]() is parameter:
            return before[1]
        wanted = self.count in self.wanted
        kept = parameter if wanted else self._fake(parameter)
        self.made[id(kept)] = (kept, self.count)
        if not wanted:
            self.given[id(parameter)] = (weakref.ref(parameter), kept)
        self.count += 1
        return kept

    def _fake(self, parameter: nn.Parameter) -> nn.Parameter:
        with self.mode:
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        return nn.Parameter(empty, requires_grad=parameter.requires_grad)

    def number(self, parameter: nn.Parameter) -> int:
        return self.made[id(parameter)][1] if id(parameter) in self.made else -1


@contextmanager
def _watching(numbers: _Numbers) -> Iterator[None]:
    handle = register_module_parameter_registration_hook(numbers.register)  # type: ignore[arg-type]
    try:
        with _Decided():  # type: ignore[no-untyped-call]
            yield
    finally:
        handle.remove()


class _Decided(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Whoever looks at a number of a fake tensor sees 0: an initialiser that repeats until all is well is content."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return torch.zeros((), dtype=args[0].dtype).item()
        return func(*args, **(kwargs or {}))


def _fill(module: nn.Module) -> None:
    """Zeros in place of fake parameters; tied ones stay tied."""
    zeros: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in list(owner._parameters.items()):
            if isinstance(parameter, FakeTensor):
                blank = hollow(tuple(parameter.shape), parameter.dtype, parameter.device, fill=0.0)
                filled = zeros.setdefault(id(parameter), nn.Parameter(blank, requires_grad=parameter.requires_grad))
                setattr(owner, name, filled)
