"""Where the rows of a batch are in a tensor of a loss's graph, found from what it was made of, the first ones first.

    FREE     of parameters alone, or of what is the same for all rows
    ROWS     a known dimension has rows, each number is of its own row alone
    ROW      of one row alone, which was taken out of the others
    SUMMED   a sum or mean over rows: only its multiples and sums are allowed from there on
    LOST     rows went into it, and where they are cannot be told

Rows enter with tensors that have no graph: what a layer was given, by their place in the batch; else by their size.
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
from gossamer.loss_reader.graph_nodes import below, made, name_of
from gossamer.loss_reader.row_dims import RowDims, RowsLost, RowsTogether
from gossamer.loss_reader.row_labels import RowLabels
from gossamer.ops.fingerprint import digest


class RowPath(Enum):
    FREE = "free"
    ROWS = "rows"
    ROW = "row"
    SUMMED = "summed"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class RowPlace:
    """Where the rows of one tensor are. `row`: which one it is of, and of which tensor."""

    way: RowPath
    layout: RowDims = ()
    row: tuple[int, int] = (0, 0)


FREE, SUMMED, LOST = RowPlace(RowPath.FREE), RowPlace(RowPath.SUMMED), RowPlace(RowPath.LOST)
EACH = RowPlace(RowPath.SUMMED, row=(1, 0))  # rows that were taken out one by one, and added up


class RowOrigin(ABC):
    """What is known of tensors that have no graph."""

    rows: int  # of this rank

    @abstractmethod
    def layout(self, tensor: Tensor, *, is_input: bool) -> RowDims | None:
        """Where a tensor of the loop has rows; None where it has none. `is_input`: what a layer was given has rows,
        however many.
        """

    @abstractmethod
    def layout_of_size(self, sizes: Sequence[int]) -> RowDims | None:
        """The same of a tensor that is not there any more."""


REDUCING = ("Sum", "Mean", "Nansum", "Dot")
GraphStep: TypeAlias = Callable[["RowFlow", Any, str, list["RowPlace | None"]], "RowPlace"]


class RowFlow:
    """Goes through a graph once, from what has no gradient to the losses."""

    def __init__(self, origin: RowOrigin, steps: Mapping[str, GraphStep], entering: frozenset[str]) -> None:
        """`entering`: the steps that see to what has no graph themselves."""
        self.origin, self._steps, self._entering = origin, steps, entering
        self.numbers = RowLabels(origin.rows)
        self.places: dict[Any, RowPlace] = {}
        self._outputs: dict[tuple[Any, int], RowPlace] = {}  # of steps that make several tensors
        self.after: set[Any] = set()  # reductions of what was reduced over rows
        self.before: set[Any] = set()  # reductions after which there are rows
        self.is_unfolded = False  # whether one row, beside something else, was given a dimension of its own
        self.is_guessed = False  # whether it could have been any of several
        self.strangers: set[str] = set()  # parts that met other rows, each of them every one of these
        self.parts: dict[str, int] = {}  # 32 bits of what was entered as a part, by its label
        self._taken: dict[int, set[int]] = {}  # rows that were taken out, by what of
        self._rows: dict[int, int] = {}  # that there were

    def run(self, roots: Iterable[Any]) -> None:
        todo = list(roots)
        while todo:
            node = todo[-1]
            if node in self.places:
                todo.pop()
            elif waiting := [one for one in below(node) if one is not None and one not in self.places]:
                todo += waiting
            else:
                self.places[node] = _checked(self._place(node))
        for key, taken in self._taken.items():
            if taken and len(taken) < self._rows[key]:
                raise RowsTogether(f"a choice of {len(taken)} of {self._rows[key]} rows")

    def _place(self, node: Any) -> RowPlace:
        name = name_of(node)
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
        except (RowsLost, RowsTogether) as error:
            if isinstance(error, RowsTogether) and not self._is_guess(error):
                raise
            for output in range(1, len(node._input_metadata)):
                self.put(node, output, LOST)
            return LOST
        if name in REDUCING and found.way is RowPath.ROWS:
            self.before.add(node)
        return found

    def _of_leaf(self, leaf: Tensor) -> RowPlace:
        """A parameter, or rows of the batch of which somebody wants the gradient."""
        is_one = isinstance(leaf, nn.Parameter) or leaf.numel() == 1
        return FREE if is_one else self.entered(leaf.detach(), leaf.shape, is_input=True)

    def made(self, node: Any, output: int) -> RowPlace:
        found = self._outputs.get((node, output)) or self.places.get(node, LOST)
        if found.way is RowPath.ROW and name_of(node) == "Unbind":
            self._taken[found.row[0]].add(found.row[1])
        return found

    def _is_guess(self, found: RowsTogether) -> bool:
        """Whether all that tells of rows is that a size is one: that may as well be of heads or of experts."""
        if self.origin.rows != 1:
            return False
        return (
            self.is_guessed
            or str(found).endswith("of several rows")
            or (self.is_unfolded and "a mean or sum over rows" in str(found))
        )

    @property
    def is_lost(self) -> bool:
        """Whether there is a step after which nobody can tell where rows are."""
        return any(place.way is RowPath.LOST for place in (*self.places.values(), *self._outputs.values()))

    def put(self, node: Any, output: int, place: RowPlace) -> None:
        """One of several tensors that a step makes."""
        self._outputs[node, output] = _checked(place)

    def row(self, source: Any, index: int, rows: int, *, is_taken: bool = True) -> RowPlace:
        """One of the rows of a source."""
        key = hash(source)
        self._taken.setdefault(key, set()).update([index] if is_taken else [])
        self._rows[key] = rows
        return RowPlace(RowPath.ROW, row=(key, index))

    def entered_by_size(self, sizes: Sequence[int]) -> RowPlace:
        found = self.origin.layout_of_size(sizes)
        return FREE if found is None else RowPlace(RowPath.ROWS, found)

    def entered(self, tensor: Tensor | None, sizes: Sequence[int], *, is_input: bool = False) -> RowPlace:
        """A tensor without a graph, or what has its sizes where it is kept out of reach."""
        if tensor is None:
            return self.entered_by_size(sizes)
        found = self.origin.layout(tensor, is_input=is_input)
        for label in () if found is None else lay.parts_of(found):
            self.parts[label] = zlib.crc32(digest([_plain(tensor)], 0).to_bytes(8, "big"), self.parts.get(label, 0))
        return FREE if found is None else RowPlace(RowPath.ROWS, found)


def _plain(tensor: Tensor) -> Tensor:
    """Numbers whose bits can be looked at."""
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor


def _checked(place: RowPlace) -> RowPlace:
    """A single row may be left without a dimension to be in."""
    return LOST if place.way is RowPath.ROWS and not lay.where(place.layout) else place


# What most steps do.


def known_of(inputs: Sequence[RowPlace | None]) -> list[RowPlace]:
    return [one for one in inputs if one is not None and one.way is not RowPath.FREE]


def without_layout(name: str, inputs: Sequence[RowPlace | None], *, is_linear: bool) -> RowPlace | None:
    """What is made of sums over rows, single rows, and what cannot be told; None where all that came in is rows."""
    known = known_of(inputs)
    ways = {one.way for one in known}
    if RowPath.SUMMED in ways:
        if not is_linear or ways - {RowPath.SUMMED, RowPath.ROW}:
            raise RowsTogether(f"{name} of a mean or sum over rows")
        return EACH if RowPath.ROW in ways or EACH in known else SUMMED
    if RowPath.LOST in ways:
        return LOST
    if RowPath.ROW in ways:
        if len({one.row for one in known}) == 1 and ways == {RowPath.ROW}:
            return known[0]
        if not is_linear or ways != {RowPath.ROW}:
            raise RowsTogether(f"{name} of several rows")
        return EACH
    return None


def entered(flow: RowFlow, node: Any, name: str, inputs: list[RowPlace | None]) -> RowPlace:
    """A step of parameters and something that has no graph."""
    for output in range(1, len(node._input_metadata)):
        flow.put(node, output, flow.entered_by_size(made(node, output)))
    return flow.entered_by_size(made(node))


def other(flow: RowFlow, node: Any, name: str, inputs: list[RowPlace | None]) -> RowPlace:
    """A step that is not known: rows stay apart where they can be seen to be in the same place, or in one place."""
    if (found := without_layout(name, inputs, is_linear=False)) is not None:
        return found
    return all_kept(flow, node, name, known_of(inputs)[0].layout)


def all_kept(flow: RowFlow, node: Any, name: str, layout: RowDims) -> RowPlace:
    """Of all that a step makes: the first in any case, others (statistics, last states) where it can be seen."""
    for output in range(1, len(node._input_metadata)):
        flow.put(node, output, kept_in(layout, made(node, output)) or LOST)
    return kept_in(layout, made(node)) or LOST


def kept_in(layout: RowDims, sizes: tuple[int, ...]) -> RowPlace | None:
    """Rows in a dimension of the same size, where there is one."""
    (at, *_) = lay.where(layout)
    dims = [dim for dim, found in enumerate(sizes) if found == lay.size_of(layout[at])]
    if at not in dims and len(dims) != 1:
        return None
    return RowPlace(RowPath.ROWS, with_dim(lay.plain(sizes), at if at in dims else dims[0], layout[at]))


def with_dim(layout: RowDims, at: int, dim: lay.Dim) -> RowDims:
    return (*layout[:at], dim, *layout[at + 1 :])
