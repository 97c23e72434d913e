"""Trace of the unit calls in one forward: what each returns, and the side outputs that it leaves elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.model.split.dataflow import HIDDEN, KEPT, CallOutput, SideOutput, containers_of
from gossamer.model.split.output_leaf import (
    ArgumentLeaf,
    ConstantLeaf,
    MadeLeaf,
    OpaqueLeaf,
    OutputLeaf,
    OverwrittenLeaf,
    Produced,
    RepeatedLeaf,
)
from gossamer.model.split.parameter_trace import ParameterTrace
from gossamer.model.split.python_effects import BEGINNING, OF_TORCH, PythonEffects
from gossamer.model.split.pytree import flatten, leaves_of
from gossamer.model.split.traced_call import SideOutputWatch, TracedCall
from gossamer.model.split.value_trace import ValueTrace

_REPEATABLE = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type(None))


@dataclass
class CallTrace:
    """A trace of the unit calls of one forward of `module`. `current`: number of the call that is running."""

    module: nn.Module
    values: ValueTrace
    parameters: ParameterTrace
    traced: list[TracedCall] = field(default_factory=list)
    current: int | None = None
    holders: list[nn.Module] = field(default_factory=list)  # modules that have lists or dicts
    without_grad: list[tuple[str, Tensor]] = field(default_factory=list)  # unit outputs while no graph was recorded

    def __post_init__(self) -> None:
        self.paths = {id(m): path for path, m in self.module.named_modules()}
        units = self.parameters.units
        self.within = {name: {id(m) for m in self.module.get_submodule(name).modules()} for name in units}

    @property
    def position(self) -> int:
        """Return the position of the code after the last recorded call: p is the code between calls p - 1 and p."""
        return len(self.traced)

    def now(self) -> float:
        """Return the number of the running call; between two calls, a number between theirs."""
        return self.position + BEGINNING if self.current is None else self.current

    def begin(self, name: str, args: Any, kwargs: Any) -> int:
        """Record that a call of the unit `name` begins; return its number."""
        self.current = self.position
        turn = sum(seen.unit == name for seen in self.traced)
        containers: list[Any] = [*containers_of((args, kwargs))]
        before = [copy.copy(container) for container in containers]
        sides = SideOutputWatch(containers, before, [*self._lists_and_dicts(name, {id(one) for one in containers})])
        effects = PythonEffects.begin(self.module.get_submodule(name), name, (args, kwargs))
        self.traced.append(TracedCall(name, turn, flatten((args, kwargs))[0], effects, sides))
        return self.current

    def drop(self) -> None:
        """Undo the record of the running call."""
        self.traced.pop()
        self.current = None

    def end(self, number: int, unit: nn.Module, output: Any, until: Any) -> None:
        """Record the output of unit call `number`, and the tensors that it stored in attributes or containers.

        until: the code object of the function that calls the forward.
        """
        list(self.values.buffers.assigned(number, self.values.taint, loose=False))
        seen = self.traced[number]
        seen.effects.end(self.module, seen.arguments, until)
        stored = [self.values.key(x) for x in seen.effects.tensors]  # other stages do not compute it
        self.values.constant.difference_update(stored)
        self.current = None
        leaves, seen.spec = flatten(output)
        first: dict[int, int] = {}
        for i, leaf in enumerate(leaves):
            same = first.setdefault(id(leaf), i) if isinstance(leaf, Tensor) else i
            seen.leaves.append(RepeatedLeaf(same) if same != i else self._leaf(seen, leaf, CallOutput(number, i)))
        kept = {self.values.where[v] for v in self.values.where if v.call == number}
        self.values.spread(seen.written - kept, frozenset((CallOutput(number, HIDDEN),)))
        self._keep_insides(number, seen, unit)
        seen.arguments = []

    def note_inner(self, module: nn.Module, args: Any, output: Any) -> None:
        """Record the output of a module within a unit, as a global forward hook gets it."""
        if self.current is None:
            return
        seen = self.traced[self.current]
        hooked = module._forward_hooks  # its output leaves the unit only through a forward hook
        if hooked and id(module) in self.within[seen.unit] and self.paths[id(module)] != seen.unit:
            path = self.paths[id(module)]
            turn = seen.sides.turns.get(path, 0)
            seen.sides.turns[path] = turn + 1
            seen.sides.inner.append((path, turn, "", output))

    def _lists_and_dicts(self, unit: str, known: set[int]) -> Iterator[tuple[str, str, Any, Any]]:
        """Yield the attributes of modules that are lists or dicts, to which a call may add."""
        if not self.holders:
            self.holders = [m for m in self.module.modules() if any(self._containers_in(m))]
        for module in (*self.holders, *self.module.get_submodule(unit).modules()):
            for name, held in self._containers_in(module):
                if id(held) not in known:
                    known.add(id(held))
                    yield self.paths[id(module)], name, held, copy.copy(held)

    @staticmethod
    def _containers_in(module: nn.Module) -> Iterator[tuple[str, Any]]:
        return ((n, x) for n, x in vars(module).items() if n not in OF_TORCH and type(x) in (list, dict))

    def _leaf(self, seen: TracedCall, leaf: Any, value: CallOutput) -> OutputLeaf:
        same = next((i for i, given in enumerate(seen.arguments) if given is leaf), None)
        if not isinstance(leaf, Tensor):
            if same is not None and leaf is not None:
                return ArgumentLeaf(same)
            return ConstantLeaf(leaf) if type(leaf) in _REPEATABLE else OpaqueLeaf(type(leaf).__qualname__)
        if leaf.layout is not torch.strided:
            return OpaqueLeaf(f"tensor of layout {leaf.layout}")
        key = self.values.key(leaf)
        is_skipped = same is not None and not seen.is_used and bool(self.parameters.owned[seen.unit])
        if same is not None and key not in seen.written and not is_skipped:
            return ArgumentLeaf(same)
        if is_skipped:
            self.values.reach(self.values.taint.get(key, ()), value.call)
        self.values.name(key, value)
        if not torch.is_grad_enabled():
            self.without_grad.append((seen.unit, leaf))
        if is_skipped and key not in seen.written:  # this time; another time it returns what it computes
            return MadeLeaf(self._to_come(leaf, seen.unit))
        return MadeLeaf(Produced.of(leaf)) if same is None else OverwrittenLeaf(Produced.of(leaf), same)

    def _to_come(self, leaf: Tensor, unit: str) -> Produced:
        """Return the output of a unit when it computes, which has passed its argument through this time."""
        made = Produced.of(leaf)
        is_trained = any(p.requires_grad for p in self.module.get_submodule(unit).parameters())
        is_grown = is_trained and torch.is_grad_enabled() and leaf.is_floating_point()
        return replace(made, needs_grad=made.needs_grad or is_grown)

    def _keep_insides(self, number: int, seen: TracedCall, unit: nn.Module) -> None:
        for inner in unit.modules():
            for name, held in vars(inner).items():
                if isinstance(held, Tensor) and self.values.born.get(self.values.key(held)) == number:
                    seen.sides.inner.append((self.paths[id(inner)], 0, name, held))
        for path, turn, attribute, output in seen.sides.inner:
            self._keep_inside(number, seen, SideOutput(path, turn, attribute, (), (), flatten(output)[1]), output)
        for i, (container, before) in enumerate(zip(seen.sides.containers, seen.sides.before, strict=True)):
            for key, held in _added(container, before):
                self._keep_inside(number, seen, SideOutput("", 0, "", (), (), flatten(held)[1], i, key), held)
        for path, name, container, before in seen.sides.kept:
            for key, held in _added(container, before):
                if any(
                    isinstance(x, Tensor) and self.values.born.get(self.values.key(x)) == number
                    for x in leaves_of(held)
                ):
                    self._keep_inside(
                        number, seen, SideOutput(path, 0, name, (), (), flatten(held)[1], KEPT, key), held
                    )
        seen.sides = SideOutputWatch()

    def _keep_inside(self, number: int, seen: TracedCall, inside: SideOutput, output: Any) -> None:
        start = len(seen.leaves) + sum(len(i.leaves) for i in seen.insides)
        leaves = flatten(output)[0]
        found = [self._inner_leaf(seen, x, CallOutput(number, start + i)) for i, x in enumerate(leaves)]
        kept, places = tuple(leaf for leaf, _ in found), tuple(at for _, at in found)
        seen.insides.append(replace(inside, leaves=kept, places=places))

    def _inner_leaf(self, seen: TracedCall, leaf: Any, value: CallOutput) -> tuple[OutputLeaf, int]:
        """Return the leaf, and the place of its value: a new one, or the one that its memory already has."""
        if not isinstance(leaf, Tensor):
            return ConstantLeaf(leaf if type(leaf) in _REPEATABLE else None), HIDDEN
        same = next((i for i, given in enumerate(seen.arguments) if given is leaf), None)
        if same is not None and self.values.key(leaf) not in seen.written:
            return ArgumentLeaf(same), HIDDEN
        key, made = self.values.key(leaf), Produced.of(leaf)
        if self.values.born.get(key) == value.call:
            self.values.name(key, value)
            return MadeLeaf(made), value.place
        named = (v.place for v, at in self.values.where.items() if at == key and v.call == value.call)
        return MadeLeaf(made), next(named, HIDDEN)


def _added(container: Any, before: Any) -> list[tuple[Any, Any]]:
    """Return (key, element) of what was added to a dict; (None, element) of what was appended to a list."""
    if isinstance(container, list):
        return [(None, held) for held in container[len(before) :]]
    return [(key, held) for key, held in container.items() if key not in before or before[key] is not held]
