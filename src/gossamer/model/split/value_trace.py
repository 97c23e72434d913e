"""Trace of unit outputs through memory: every storage carries the set of unit outputs that it was computed from.

Within a unit call nothing is followed: what it reads is an edge, what it returns is a value. A tensor made within a
call may be read outside without having been returned: a side output, or else a hidden value.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gossamer.model.split.buffer_trace import BufferTrace
from gossamer.model.split.dataflow import HIDDEN, CallOutput
from gossamer.model.split.output_leaf import OutputLeaf, TensorLeaf


@dataclass
class ValueTrace:
    """A trace of the unit outputs in memory, and of the unit calls and positions that read them.

    A storage is named by `key`.
    """

    key: Callable[[Tensor], int]
    buffers: BufferTrace
    taint: dict[int, frozenset[CallOutput]] = field(default_factory=dict)
    born: dict[int, int] = field(default_factory=dict)  # storage -> call in which it was made
    where: dict[CallOutput, int] = field(default_factory=dict)  # storage of each value
    named: dict[int, list[CallOutput]] = field(default_factory=dict)  # storage -> values
    constant: set[int] = field(default_factory=set)  # memory computed from constants: every stage computes the same
    nodes: set[CallOutput] = field(default_factory=set)  # whose grad_fn the model's code takes
    changed: set[CallOutput] = field(default_factory=set)  # written in place after they were made
    readers: dict[CallOutput, set[int]] = field(default_factory=dict)
    branches: dict[CallOutput, set[int]] = field(default_factory=dict)

    def read(self, ins: Iterable[Tensor], current: int | None) -> frozenset[CallOutput]:
        """Return the unit outputs that the tensors depend on. `current`: the call that reads them, if any."""
        values: frozenset[CallOutput] = frozenset()
        for tensor in ins:
            key = self.key(tensor)
            values |= self.taint.get(key, frozenset()) | self.buffers.put.get(key, frozenset())
            home = self.born.get(key)
            if home is not None and home != current and key not in self.constant:
                values |= {CallOutput(home, HIDDEN)}
        return values

    def spread(self, keys: Iterable[int], values: frozenset[CallOutput]) -> None:
        """Record that storages were computed from `values`."""
        for key in keys:
            self.taint[key] = self.taint.get(key, frozenset()) | values

    def reach(self, values: Iterable[CallOutput], at: int) -> None:
        """Record that the call or position `at` depends on `values`."""
        for value in values:
            self.readers.setdefault(value, set()).add(at)

    def follow_constants(self, func: Any, ins: Iterable[Tensor], made: Collection[int]) -> None:
        """Record whether an operator has computed the memory `made` from constants alone."""
        keys = {self.key(x) for x in ins}
        is_drawn = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        if func is torch.ops.aten.lift_fresh.default:  # a literal
            self.constant.update(keys, made)
        elif keys <= self.constant and not is_drawn:
            self.constant.update(made)
        else:
            self.constant.difference_update(made)

    def name(self, key: int, value: CallOutput) -> None:
        """Call the storage `value` from here on; a view of older storage is that value too."""
        older = frozenset() if self.born.pop(key, None) is not None else self.taint.get(key, frozenset())
        self.taint[key] = older | {value}
        self.where[value] = key
        self.named.setdefault(key, []).append(value)

    def overlaps(self, number: int) -> tuple[tuple[int, ...], ...]:
        """Return the places of call `number` whose tensors share memory that is changed later."""
        of_call = ([v.place for v in values if v.call == number] for values in self.named.values())
        return tuple(tuple(p) for p in of_call if len(p) > 1 and CallOutput(number, p[0]) in self.changed)

    def marked(self, leaf: OutputLeaf, value: CallOutput) -> OutputLeaf:
        """Return the leaf, marked as written if its tensor is changed in place later."""
        return leaf.written() if isinstance(leaf, TensorLeaf) and value in self.changed else leaf
