"""Trace of one forward of a model: which units run, in which order, and which parameters are read outside of their
unit.

The latter include parameters that a unit reads after it has computed its output: backward reads them before it reaches
the unit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gossamer.sharding._tiled_weight import TiledWeight
from gossamer.sharding._unshard_order import UnshardOrder, unit_of


@dataclass(slots=True)
class AccessTrace:
    """The trace of a forward: units as they ran, parameters read outside of their unit, units in the backward pass."""

    module: nn.Module
    units: tuple[str, ...]
    order: list[str] = field(default_factory=list)
    loose: set[str] = field(default_factory=set)
    backward: set[str] = field(default_factory=set)  # the units whose output depends on what is trained
    running: list[str] = field(default_factory=list)
    read: dict[str, int] = field(default_factory=dict)  # parameter -> the number of the last node that did
    tiled: Mapping[str, TiledWeight] = field(default_factory=dict)
    absent: frozenset[str] = frozenset()  # parameters that lie on other stages
    whole: set[str] = field(default_factory=set)  # tiled weights that other code than their layer reads

    def walk(self) -> UnshardOrder:
        """Return the unshard order of every step. Units that did not run stay unsharded for the whole step."""
        found = UnshardOrder.of(self.module, self.order, self.loose, absent=self.absent).through(self.backward)
        return replace(found, tiled=tuple(name for name in self.tiled if name in self.read and name not in self.whole))


@contextmanager
def trace_access(
    module: nn.Module, units: Sequence[str], tiled: Sequence[TiledWeight] = (), *, absent: Collection[str] = ()
) -> Iterator[AccessTrace]:
    """Trace the forward that runs inside the context. `tiled`: the weights of layers that run in tiles.

    `absent`: parameters of the module that lie on other stages.
    """
    seen = AccessTrace(module, tuple(units), tiled={one.name: one for one in tiled}, absent=frozenset(absent))
    named = [u for u in units if u]
    real = {u: module.get_submodule(u) for u in named}
    own = {u: vars(one).get("forward") for u, one in real.items()}
    for unit, one in real.items():
        one.forward = _TracedParameter(seen, unit, one.forward)  # type: ignore[method-assign]
    try:
        with _Reads(seen):
            yield seen
    finally:
        for unit, one in real.items():
            before = own[unit]
            if before is None:
                del one.forward
            else:
                one.forward = before  # type: ignore[method-assign]


@dataclass(slots=True)
class _TracedParameter:
    """The forward of a unit, which records that the unit runs."""

    seen: AccessTrace
    unit: str
    real: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.unit not in self.seen.order:
            self.seen.order.append(self.unit)
        self.seen.running.append(self.unit)
        try:
            output = self.real(*args, **kwargs)
        finally:
            self.seen.running.pop()
        nodes = [one.grad_fn for one in tensors_of(output) if one.grad_fn is not None]
        if nodes:  # from the last of them on, backward runs in the unit
            last = max(node._sequence_nr() for node in nodes)
            self.seen.backward.add(self.unit)
            self.seen.loose |= {n for n, at in self.seen.read.items() if at > last and self._is_own(n)}
        return output

    def _is_own(self, name: str) -> bool:
        return unit_of(name, self.seen.units) == self.unit


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that records which parameters each operation reads."""

    def __init__(self, seen: AccessTrace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = seen
        self._names: dict[int, list[str]] = {}
        there = ((name, p) for name, p in seen.module.named_parameters() if name not in seen.absent)
        for name, param in there:
            self._names.setdefault(_storage(param), []).append(name)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        for name in (n for one in read for n in self._names.get(_storage(one), ())):
            if name in self._seen.tiled and not self._seen.tiled[name].is_running:
                self._seen.whole.add(name)
            self._seen.read[name] = torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]
            if unit_of(name, self._seen.units) not in self._seen.running:
                self._seen.loose.add(name)
        return func(*args, **(kwargs or {}))


def _storage(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse tensors have none
        return -1


def tensors_of(held: Any) -> list[Tensor]:
    """Return all tensors in a module's inputs or outputs: in lists, tuples, dicts, dataclasses and torch's pytrees."""
    found: list[Tensor] = []
    for leaf in tree_leaves(held):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            found += tensors_of([getattr(leaf, one.name, None) for one in fields(leaf)])
    return found
