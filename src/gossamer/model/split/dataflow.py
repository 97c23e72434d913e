"""Flow: what a forward was seen to do, in units: who is called when, what each call gives, and who reads it."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.model.split.pytree import TreeShape

TOLD = -2  # the place of what a call looked at, as bytes
TOLD_BYTES = 2048
KEPT = -2  # in place of the number of a container: it is an attribute of a module
FIRST = -1.0  # before all that a forward does
HIDDEN = -1  # the place of a tensor that was made inside a call and that nothing outside is known to hold


@dataclass(frozen=True, slots=True, order=True)
class CallOutput:
    """A tensor that call number `call` makes: `place` counts the leaves of its output, then those of its insides."""

    call: int
    place: int


@dataclass(frozen=True, slots=True)
class OutputLeaf:
    """One leaf of what a call returns: passed through (`source`), `made`, or else a `constant`. Both of the former:
    made by writing into the argument.
    """

    constant: Any = None
    source: int | None = None  # number of the argument leaf that it is
    made: Produced | None = None
    opaque: str = ""  # type of a constant that nobody can repeat
    same: int | None = None  # an earlier leaf of the output that is this very object

    @property
    def is_python(self) -> bool:
        """Whether it is a number, a word or an object, which another forward may give as another."""
        return (
            self.made is None
            and self.source is None
            and self.same is None
            and (bool(self.opaque) or self.constant is not None)
        )


@dataclass(frozen=True, slots=True)
class Produced:
    """A tensor that a call makes. `written`: somebody changes it in place later."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    needs_grad: bool
    written: bool = False
    strides: tuple[int, ...] | None = field(default=None, compare=False)  # None: as torch lays them out

    @staticmethod
    def of(tensor: Tensor) -> Produced:
        """What it looks like."""
        strides = None if tensor.layout is not torch.strided or tensor.is_contiguous() else tensor.stride()
        return Produced(tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad, strides=strides)

    @property
    def layout(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Its shape and strides."""
        return self.shape, self.strides or torch.empty(self.shape, device="meta").stride()


@dataclass(frozen=True, slots=True)
class SideOutput:
    """What a call leaves behind besides its output, and others read: the output of a module within the unit, taken by
    a hook, an attribute of one, or what it puts into a list or dict it was given.

    `places[i]` is the Value.place of leaf i; several leaves may be one value.
    """

    module: str  # path from the root
    turn: int  # which call of that module within the unit's call
    attribute: str  # "" for an output
    leaves: tuple[OutputLeaf, ...]
    places: tuple[int, ...]
    spec: TreeShape
    container: int = -1  # number of the list or dict among the arguments; KEPT: it is the attribute
    key: Any = None  # under which a dict holds it; None: appended to a list


@dataclass(frozen=True, slots=True)
class UnitCall:
    """One call of a unit."""

    unit: str
    turn: int  # how often the unit was called before
    leaves: tuple[OutputLeaf, ...]
    spec: TreeShape
    insides: tuple[SideOutput, ...] = ()
    overlaps: tuple[tuple[int, ...], ...] = ()  # places whose tensors lie in one memory, which somebody changes later
    effects: tuple[str, ...] = ()  # what it does in Python, that others may read
    is_told: bool = False  # what it gives in Python may depend on numbers of tensors: where it ran tells the rest
    flop: float = 0.0  # of its forward
    parameter_bytes: int = 0  # of the unit

    @property
    def name(self) -> str:
        """As a cut names it: the unit, and where it is called again, @ and which time it is."""
        return f"{self.unit}@{self.turn}" if self.turn else self.unit

    @property
    def is_pure(self) -> bool:
        """Whether nothing comes of it but tensors, None, and what it was given."""
        return not self.is_told and not self.is_python

    @property
    def is_python(self) -> bool:
        """Whether it gives or does anything in Python, beside giving None."""
        return bool(self.effects) or any(leaf.is_python for leaf in self.leaves)

    def made(self, place: int) -> Produced:
        """What the value at `place` looks like."""
        if place == TOLD:
            return Produced((TOLD_BYTES,), torch.uint8, self._device(), needs_grad=False)
        leaves = [*self.leaves] if place < len(self.leaves) else []
        at = place
        if not leaves:
            inside = next(i for i in self.insides if place in i.places)
            leaves, at = [*inside.leaves], inside.places.index(place)
        made = leaves[at].made
        assert made is not None
        return made

    def _device(self) -> torch.device:
        made = (leaf.made for leaf in self.leaves if leaf.made is not None)
        return next((one.device for one in made), torch.device("cpu"))


@dataclass(frozen=True, slots=True)
class BufferWrite:
    """A buffer is changed by call `at`; if `loose` by the code before that, to what it computes from `values`."""

    at: int
    loose: bool
    values: frozenset[CallOutput] = frozenset()


@dataclass(frozen=True, slots=True)
class BufferUse:
    """What a forward does with a buffer. `readers`: calls, and the end, that depend on it; `looks`: positions where
    Python looks at a number computed from it.
    """

    changes: frozenset[BufferWrite]
    readers: frozenset[int]
    looks: frozenset[int]


@dataclass(frozen=True, slots=True)
class LateOutput:
    """What Python holds and the forward changes, after the look at a number at `after` (FIRST: at all). `readers`, and
    `written` last: calls, and for the code between them numbers between theirs.
    """

    name: str
    readers: frozenset[float]
    written: float
    after: float = FIRST

    def matters(self, end: float) -> bool:
        """Whether the next forward is another one where this one ends there."""
        is_behind = self.after == end if self.after != FIRST else self.written >= end
        return is_behind and any(reader <= end for reader in self.readers)


@dataclass(frozen=True, slots=True)
class DataFlow:
    """One forward of one kind of batch. Position p is the code between call p - 1 and call p; `len(calls)` the end."""

    calls: tuple[UnitCall, ...]
    readers: Mapping[CallOutput, frozenset[int]]  # -> calls, and the end, that depend on it
    branches: Mapping[CallOutput, frozenset[int]]  # -> positions where Python looks at a number computed from it
    loose: Mapping[str, frozenset[int]]  # parameter or buffer read outside of its units -> positions
    lent: Mapping[str, frozenset[int]]  # the same, read inside other units' calls -> those calls
    units: tuple[str, ...]
    late: tuple[LateOutput, ...] = ()
    stirred: tuple[LateOutput, ...] = ()  # what the forward changes before the look at `after`
    stirs: frozenset[float] = frozenset()  # when, as in Late, the forward changes tensors that stay
    by_chance: bool = False  # the code between units may have looked at a random number
    buffers: Mapping[str, BufferUse] = field(default_factory=dict)
    written: frozenset[str] = frozenset()  # parameters, buffers and attributes of modules that it writes to in place
    nodes: frozenset[CallOutput] = frozenset()  # whose nodes in the graph (grad_fn) the code between units takes
    touched: frozenset[str] = frozenset()  # attributes of modules that the forward reads or sets
    looked_into: Mapping[str, frozenset[float]] = field(default_factory=dict)  # of these, by whom: see Late.readers
    kept: Mapping[str, frozenset[int]] = field(default_factory=dict)  # attribute of a module -> calls that change it
    left: Mapping[str, frozenset[int]] = field(default_factory=dict)  # outside of modules, a tensor -> the same
    slope: str = ""  # a call through which the code between units takes a gradient
    names: Mapping[str, int] = field(default_factory=dict)  # call name -> number

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", {call.name: i for i, call in enumerate(self.calls)})

    @property
    def end(self) -> int:
        return len(self.calls)

    def last_reader(self, value: CallOutput) -> int:
        """The last call that depends on `value`; -1 where nothing does."""
        return max(self.readers.get(value, frozenset()), default=-1)


def hollow(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, own: bool = False, fill: float = float("nan")
) -> Tensor:
    """A tensor of one repeated element: `fill`, or 0 where the type has no nan. `own`: with memory."""
    number: float = fill if dtype.is_floating_point or dtype.is_complex else 0
    if own:
        return torch.full(shape, number, dtype=dtype, device=device)
    return torch.full((), number, dtype=dtype, device=device).expand(shape)


def containers_of(arguments: Any) -> list[MutableMapping[Any, Any] | list[Any]]:
    """The lists, and the dicts and what acts as one, among the arguments of a call, which may put something there; also
    attributes of dataclasses.
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
