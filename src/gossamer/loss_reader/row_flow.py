"""Forward pass over a loss's autograd graph that finds where each tensor has the rows of the batch, inputs first.

    FREE     of parameters alone, or equal for all rows
    ROWS     a known dimension has rows; each element depends on its own row alone
    ROW      of one row alone, selected from the others
    SUMMED   a sum or mean over rows; only multiples and sums of it are allowed afterwards
    LOST     depends on rows in an unknown dimension

Rows enter with tensors that have no graph: a layer's input, by its place in the batch, else by its size.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from gossamer.loss_reader import row_dims as lay
from gossamer.loss_reader.graph_nodes import made, nodes_below, op_name
from gossamer.loss_reader.row_dims import RowDims, RowsLost, RowsMixed
from gossamer.loss_reader.row_labels import RowLabels
from gossamer.ops.fingerprint import digest


class RowPath(Enum):
    """The relation of a graph tensor to the rows of the batch; the module's docstring defines each value."""

    FREE = "free"
    ROWS = "rows"
    ROW = "row"
    SUMMED = "summed"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class RowPlace:
    """The place of the rows in one tensor: layout, or, for a single row, `row` = (source tensor, row number)."""

    way: RowPath
    layout: RowDims = ()
    row: tuple[int, int] = (0, 0)


FREE, SUMMED, LOST = RowPlace(RowPath.FREE), RowPlace(RowPath.SUMMED), RowPlace(RowPath.LOST)
EACH = RowPlace(RowPath.SUMMED, row=(1, 0))  # rows selected one by one, and added


class RowOrigin(ABC):
    """The interface that tells where tensors without an autograd graph have rows."""

    rows: int  # of this rank

    @abstractmethod
    def layout(self, tensor: Tensor, *, is_input: bool) -> RowDims | None:
        """Return where a tensor of the loop has rows; None if it has none.

        `is_input`: whether it is a layer's input, which is taken to have rows, however many.
        """

    @abstractmethod
    def layout_of_size(self, sizes: Sequence[int]) -> RowDims | None:
        """Return where a tensor, of which only the sizes are known, has rows; None if it has none."""


REDUCING = ("Sum", "Mean", "Nansum", "Dot")
GraphStep: TypeAlias = Callable[["RowFlow", Any, str, list["RowPlace | None"]], "RowPlace"]


class RowFlow:
    """The tracker of rows: visits each node of an autograd graph once, from its inputs to the losses."""

    def __init__(self, origin: RowOrigin, steps: Mapping[str, GraphStep], entering: frozenset[str]) -> None:
        """Start without nodes. `entering`: names of the operations that handle inputs without a graph themselves."""
        self.origin, self._steps, self._entering = origin, steps, entering
        self.numbers = RowLabels(origin.rows)
        self.places: dict[Any, RowPlace] = {}
        self._outputs: dict[tuple[Any, int], RowPlace] = {}  # of nodes with several outputs
        self.after: set[Any] = set()  # reductions of what was reduced over rows
        self.before: set[Any] = set()  # reductions that keep the rows
        self.is_unfolded = False  # whether a single row beside other elements got its own dimension
        self.is_guessed = False  # whether several dimensions were possible
        self.strangers: set[str] = set()  # labels of data of unknown origin combined with every row
        self.parts: dict[str, int] = {}  # 32-bit hash of data of unknown origin, by label
        self._taken: dict[int, set[int]] = {}  # selected row numbers, by source
        self._rows: dict[int, int] = {}  # number of rows, by source

    def run(self, roots: Iterable[Any]) -> None:
        """Visit all nodes below `roots`. Raises RowsMixed if a node mixes rows, or only some rows were selected."""
        todo = list(roots)
        while todo:
            node = todo[-1]
            if node in self.places:
                todo.pop()
            elif waiting := [one for one in nodes_below(node) if one not in self.places]:
                todo += waiting
            else:
                self.places[node] = _checked(self._place(node))
        for key, taken in self._taken.items():
            if taken and len(taken) < self._rows[key]:
                raise RowsMixed(f"a choice of {len(taken)} of {self._rows[key]} rows")

    def _place(self, node: Any) -> RowPlace:
        name = op_name(node)
        if name == "AccumulateGrad":
            return self._of_leaf(node.variable)
        inputs = [None if one is None else self.made(one, output) for one, output in node.next_functions]
        if name in REDUCING and any(one.way is RowPath.SUMMED for one in known_of(inputs)):
            self.after.add(node)
        step = self._steps.get(name, other)
        if name not in self._entering and not known_of(inputs):
            if None not in inputs:
                return FREE
            step = entered
        try:
            found = step(self, node, name, inputs)
        except _Settled as settled:
            found = settled.place
        except (RowsLost, RowsMixed) as error:
            if isinstance(error, RowsMixed) and not self._is_guess(error):
                raise
            for output in range(1, len(node._input_metadata)):
                self.put(node, output, LOST)
            return LOST
        if name in REDUCING and found.way is RowPath.ROWS:
            self.before.add(node)
        return found

    def _of_leaf(self, leaf: Tensor) -> RowPlace:
        """Return the place of a leaf: a parameter, or rows of the batch that require a gradient."""
        is_one = isinstance(leaf, nn.Parameter) or leaf.numel() == 1
        return FREE if is_one else self.entered(leaf.detach(), leaf.shape, is_input=True)

    def made(self, node: Any, output: int) -> RowPlace:
        """Return the place of the rows in one output of a node."""
        found = self._outputs.get((node, output)) or self.places.get(node, LOST)
        if found.way is RowPath.ROW and op_name(node) == "Unbind":
            self._taken[found.row[0]].add(found.row[1])
        return found

    def _is_guess(self, found: RowsMixed) -> bool:
        """Return whether only a size of one suggests rows, which may as well be of heads or of experts."""
        if self.origin.rows != 1:
            return False
        return (
            self.is_guessed
            or str(found).endswith("of several rows")
            or (self.is_unfolded and "a mean or sum over rows" in str(found))
        )

    @property
    def is_lost(self) -> bool:
        """Return whether some node's output has rows in an unknown dimension."""
        return any(place.way is RowPath.LOST for place in (*self.places.values(), *self._outputs.values()))

    def put(self, node: Any, output: int, place: RowPlace) -> None:
        """Record the place of one of several outputs of a node."""
        self._outputs[node, output] = _checked(place)

    def row(self, source: Any, index: int, rows: int, *, is_taken: bool = True) -> RowPlace:
        """Return the place of row `index` of a source with `rows` rows, and record it as selected if `is_taken`."""
        key = hash(source)
        self._taken.setdefault(key, set()).update([index] if is_taken else [])
        self._rows[key] = rows
        return RowPlace(RowPath.ROW, row=(key, index))

    def entered_by_size(self, sizes: Sequence[int]) -> RowPlace:
        """Return the place of a tensor without a graph, of which only the sizes are known."""
        found = self.origin.layout_of_size(sizes)
        return FREE if found is None else RowPlace(RowPath.ROWS, found)

    def entered(self, tensor: Tensor | None, sizes: Sequence[int], *, is_input: bool = False) -> RowPlace:
        """Return the place of a tensor without a graph; if `tensor` is None (not saved), its sizes decide."""
        if tensor is None:
            return self.entered_by_size(sizes)
        found = self.origin.layout(tensor, is_input=is_input)
        for label in () if found is None else lay.parts_of(found):
            self.parts[label] = zlib.crc32(digest([_plain(tensor)], 0).to_bytes(8, "big"), self.parts.get(label, 0))
        return FREE if found is None else RowPlace(RowPath.ROWS, found)


def _plain(tensor: Tensor) -> Tensor:
    """Return a real-valued or byte view of a tensor, which can be hashed."""
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor


def _checked(place: RowPlace) -> RowPlace:
    """Return LOST for a layout without any row dimension, as a single row may leave."""
    return LOST if place.way is RowPath.ROWS and not lay.where(place.layout) else place


# Shared by most operations.


def known_of(inputs: Sequence[RowPlace | None]) -> list[RowPlace]:
    """Return the inputs that depend on rows."""
    return [one for one in inputs if one is not None and one.way is not RowPath.FREE]


class _Settled(Exception):
    """The place of a result that has no layout, raised to end the operation's own step."""

    def __init__(self, place: RowPlace) -> None:
        super().__init__(place.way.value)
        self.place = place


def need_layouts(name: str, inputs: Sequence[RowPlace | None], *, is_linear: bool) -> None:
    """Return if every input that depends on rows has a layout.

    Else raise `_Settled` with the place of the result (row sums, single rows or lost rows), or RowsMixed if the
    operation mixes rows. `is_linear`: whether it is a sum or a multiple of its inputs.
    """
    known = known_of(inputs)
    ways = {one.way for one in known}
    if RowPath.SUMMED in ways:
        if not is_linear or ways - {RowPath.SUMMED, RowPath.ROW}:
            raise RowsMixed(f"{name} of a mean or sum over rows")
        raise _Settled(EACH if RowPath.ROW in ways or EACH in known else SUMMED)
    if RowPath.LOST in ways:
        raise _Settled(LOST)
    if RowPath.ROW in ways:
        if len({one.row for one in known}) == 1 and ways == {RowPath.ROW}:
            raise _Settled(known[0])
        if not is_linear or ways != {RowPath.ROW}:
            raise RowsMixed(f"{name} of several rows")
        raise _Settled(EACH)


def entered(flow: RowFlow, node: Any, name: str, inputs: list[RowPlace | None]) -> RowPlace:
    """Return the place of an operation on parameters and tensors without a graph, by its output's size."""
    for output in range(1, len(node._input_metadata)):
        flow.put(node, output, flow.entered_by_size(made(node, output)))
    return flow.entered_by_size(made(node))


def other(flow: RowFlow, node: Any, name: str, inputs: list[RowPlace | None]) -> RowPlace:
    """Return the place of an unknown operation's result: rows stay where the output has the same size in their
    dimension.
    """
    need_layouts(name, inputs, is_linear=False)
    return all_kept(flow, node, name, known_of(inputs)[0].layout)


def all_kept(flow: RowFlow, node: Any, name: str, layout: RowDims) -> RowPlace:
    """Record the place of every output: of the first, and of others (statistics, last states) if sizes show it."""
    for output in range(1, len(node._input_metadata)):
        flow.put(node, output, kept_in(layout, made(node, output)) or LOST)
    return kept_in(layout, made(node)) or LOST


def kept_in(layout: RowDims, sizes: tuple[int, ...]) -> RowPlace | None:
    """Return rows in the dimension of the same size; None if there is no such dimension, or several others."""
    (at, *_) = lay.where(layout)
    dims = [dim for dim, found in enumerate(sizes) if found == lay.size_of(layout[at])]
    if at not in dims and len(dims) != 1:
        return None
    return RowPlace(RowPath.ROWS, with_dim(lay.plain(sizes), at if at in dims else dims[0], layout[at]))


def with_dim(layout: RowDims, at: int, dim: lay.Dim) -> RowDims:
    """Return the layout with dimension `at` replaced by `dim`."""
    return (*layout[:at], dim, *layout[at + 1 :])
