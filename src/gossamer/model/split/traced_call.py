"""Record of one unit call while it is traced."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from gossamer.model.split.dataflow import CallOutput, SideOutput, UnitCall
from gossamer.model.split.output_leaf import ArgumentLeaf, OutputLeaf, TensorLeaf
from gossamer.model.split.python_effects import PythonEffects
from gossamer.model.split.pytree import TreeShape
from gossamer.model.split.value_trace import ValueTrace


@dataclass
class SideOutputWatch:
    """The places in which a running call may leave tensors that it does not return, and what modules in it returned."""

    containers: list[Any] = field(default_factory=list)  # lists and dicts among the arguments
    before: list[Any] = field(default_factory=list)  # copies of them
    kept: list[tuple[str, str, Any, Any]] = field(default_factory=list)  # of modules: path, attribute, object, a copy
    inner: list[tuple[str, int, str, Any]] = field(default_factory=list)  # module, turn, attribute, output
    turns: dict[str, int] = field(default_factory=dict)


@dataclass
class TracedCall:
    """A record of one unit call while it is traced: arguments, output tensors, side effects."""

    unit: str
    turn: int
    arguments: list[Any]
    effects: PythonEffects
    sides: SideOutputWatch
    leaves: list[OutputLeaf] = field(default_factory=list)
    spec: TreeShape | None = None
    insides: list[SideOutput] = field(default_factory=list)
    written: set[int] = field(default_factory=set)  # storages from elsewhere
    looked: bool = False
    is_used: bool = False  # whether it computes with a parameter or buffer of the unit
    flop: float = 0.0

    def unit_call(self, number: int, values: ValueTrace, effects: tuple[str, ...], parameter_bytes: int) -> UnitCall:
        """Return the call, number `number` of the forward, for the data flow. `effects`: those that others may read."""
        assert self.spec is not None
        leaves = tuple(values.marked(leaf, CallOutput(number, i)) for i, leaf in enumerate(self.leaves))
        marked = tuple(
            replace(
                i,
                leaves=tuple(values.marked(a, CallOutput(number, p)) for a, p in zip(i.leaves, i.places, strict=True)),
            )
            for i in self.insides
        )
        gives = (
            bool(effects) or len(leaves) > 1 or not all(isinstance(leaf, ArgumentLeaf | TensorLeaf) for leaf in leaves)
        )
        return UnitCall(
            self.unit,
            self.turn,
            leaves,
            self.spec,
            marked,
            overlaps=values.overlaps(number),
            effects=effects,
            is_told=self.looked and gives,
            flop=self.flop,
            parameter_bytes=parameter_bytes,
        )
