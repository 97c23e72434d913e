"""Data flow of one traced forward between units: their calls in order, the output tensors, and the readers of these."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.model.split.output_leaf import OutputLeaf, Produced, TensorLeaf
from gossamer.model.split.pytree import TreeShape

TOLD = -2  # CallOutput.place of the values that a call read, as a message of bytes
TOLD_BYTES = 2048
KEPT = -2  # SideOutput.container: the list or dict is an attribute of a module
FIRST = -1.0  # before all that a forward does
HIDDEN = -1  # CallOutput.place of a tensor made inside a call that no output is known to hold


@dataclass(frozen=True, slots=True, order=True)
class CallOutput:
    """A tensor that unit call number `call` makes. `place`: its index among the leaves of all outputs of the call."""

    call: int
    place: int


@dataclass(frozen=True, slots=True)
class SideOutput:
    """A tensor, or a structure of tensors, that a unit call leaves for other code besides its return value.

    It is one of three: the output of a module within the unit that a forward hook takes, an attribute of such a module,
    or an element added to a list or dict. `places[i]` is the `CallOutput.place` of leaf i; several leaves may be one
    value.
    """

    module: str  # path from the root
    turn: int  # which call of that module within the unit's call
    attribute: str  # "" for an output
    leaves: tuple[OutputLeaf, ...]
    places: tuple[int, ...]
    spec: TreeShape
    container: int = -1  # index of the list or dict among the arguments; KEPT: it is the attribute
    key: Any = None  # key in the dict; None: appended to a list


@dataclass(frozen=True, slots=True)
class UnitCall:
    """A call of a unit in one forward: its output tensors, its Python side effects and its cost."""

    unit: str
    turn: int  # how often the unit was called before
    leaves: tuple[OutputLeaf, ...]
    spec: TreeShape
    insides: tuple[SideOutput, ...] = ()
    overlaps: tuple[tuple[int, ...], ...] = ()  # places whose tensors share memory that is changed later
    effects: tuple[str, ...] = ()  # Python side effects that others may read
    is_told: bool = False  # its Python outputs may depend on tensor values: its stage sends them
    flop: float = 0.0  # of its forward
    parameter_bytes: int = 0  # of the unit

    @property
    def name(self) -> str:
        """Return the name used in split points: the unit, and for later calls @ and the number of earlier calls."""
        return f"{self.unit}@{self.turn}" if self.turn else self.unit

    @property
    def is_pure(self) -> bool:
        """Return whether the call returns only tensors, None and its arguments, and has no Python side effects."""
        return not self.is_told and not self.is_python

    @property
    def is_python(self) -> bool:
        """Return whether the call returns Python values other than None, or has Python side effects."""
        return bool(self.effects) or any(leaf.is_python for leaf in self.leaves)

    def made(self, place: int) -> Produced:
        """Return the description of the tensor at `place`."""
        if place == TOLD:
            return Produced((TOLD_BYTES,), torch.uint8, self._device(), needs_grad=False)
        leaves = [*self.leaves] if place < len(self.leaves) else []
        at = place
        if not leaves:
            inside = next(i for i in self.insides if place in i.places)
            leaves, at = [*inside.leaves], inside.places.index(place)
        leaf = leaves[at]
        assert isinstance(leaf, TensorLeaf)
        return leaf.made

    def _device(self) -> torch.device:
        made = (leaf.made for leaf in self.leaves if isinstance(leaf, TensorLeaf))
        return next((one.device for one in made), torch.device("cpu"))


@dataclass(frozen=True, slots=True)
class BufferWrite:
    """A write to a buffer by unit call `at`, or if `loose` by the code before it, computed from `values`."""

    at: int
    loose: bool
    values: frozenset[CallOutput] = frozenset()


@dataclass(frozen=True, slots=True)
class BufferUse:
    """The use of a buffer tensor in one forward.

    `changes`: writes to it; `readers`: unit calls, and the end of the forward, that depend on it; `looks`: positions
    where Python reads a value computed from it.
    """

    changes: frozenset[BufferWrite]
    readers: frozenset[int]
    looks: frozenset[int]


@dataclass(frozen=True, slots=True)
class LateWrite:
    """A piece of Python state that the forward changes after the tensor value read at `after` (FIRST: at any time).

    `readers`, and `written` for the last write, are numbers of unit calls; code between two calls has a number between
    theirs.
    """

    name: str
    readers: frozenset[float]
    written: float
    after: float = FIRST

    def matters(self, end: float) -> bool:
        """Return whether the next forward would differ if this one ended at `end`."""
        is_behind = self.after == end if self.after != FIRST else self.written >= end
        return is_behind and any(reader <= end for reader in self.readers)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterUse:
    """The use of parameters, buffers and tensor attributes outside of the units that hold them, in one forward."""

    loose: Mapping[str, frozenset[int]]  # read by the code between units -> positions
    lent: Mapping[str, frozenset[int]]  # read inside other units' calls -> those calls
    written: frozenset[str]  # written in place


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonStateUse:
    """The use of Python state in one forward: attributes of modules, and containers that modules hold."""

    late: tuple[LateWrite, ...]
    stirred: tuple[LateWrite, ...]  # state that the forward changes before the read at `after`
    stirs: frozenset[float]  # when (as in LateWrite) the forward changes lasting tensors
    touched: frozenset[str]  # attributes of modules that the forward reads or sets
    looked_into: Mapping[str, frozenset[float]]  # their readers: see LateWrite.readers
    kept: Mapping[str, frozenset[int]]  # attribute of a module -> calls that change it
    left: Mapping[str, frozenset[int]]  # tensor held outside of modules -> the same


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFlow:
    """The data flow of one forward for one kind of batch: unit calls, and the readers of each tensor.

    Position p is the code between call p - 1 and call p; `len(calls)` is the end of the forward.
    """

    calls: tuple[UnitCall, ...]
    units: tuple[str, ...]
    readers: Mapping[CallOutput, frozenset[int]]  # -> calls, and the end, that depend on it
    branches: Mapping[CallOutput, frozenset[int]]  # -> positions where Python reads a value computed from it
    nodes: frozenset[CallOutput]  # whose grad_fn the code between units takes
    parameters: ParameterUse
    buffers: Mapping[str, BufferUse]
    state: PythonStateUse
    by_chance: bool  # the code between units may have read a random number
    slope: str  # a unit through which the code between units computes a gradient
    names: Mapping[str, int] = field(default_factory=dict)  # call name -> number

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", {call.name: i for i, call in enumerate(self.calls)})

    @property
    def end(self) -> int:
        """Return the position of the end of the forward."""
        return len(self.calls)

    def last_reader(self, value: CallOutput) -> int:
        """Return the last call that depends on `value`; -1 if none does."""
        return max(self.readers.get(value, frozenset()), default=-1)


def hollow(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, own: bool = False, fill: float = float("nan")
) -> Tensor:
    """Return a tensor that repeats one element: `fill`, or 0 if the dtype has no NaN. `own`: elements have memory."""
    number: float = fill if dtype.is_floating_point or dtype.is_complex else 0
    if own:
        return torch.full(shape, number, dtype=dtype, device=device)
    return torch.full((), number, dtype=dtype, device=device).expand(shape)


def containers_of(arguments: Any) -> list[MutableMapping[Any, Any] | list[Any]]:
    """Return the lists and mappings among the arguments of a call, which the call may add to.

    Containers in containers count, and attributes of dataclasses.
    """
    found: list[MutableMapping[Any, Any] | list[Any]] = []
    if is_dataclass(arguments) and not isinstance(arguments, type | nn.Module) and hasattr(arguments, "__dict__"):
        arguments = vars(arguments)
    if isinstance(arguments, MutableMapping | list):
        found.append(arguments)
    if isinstance(arguments, MutableMapping | list | tuple):
        for inner in arguments.values() if isinstance(arguments, MutableMapping) else arguments:
            found += containers_of(inner)
    return found
