"""Whether the rows of a batch stay apart on the way to a loss: then it is a mean or a sum of what each row makes alone.

Every tensor of the graph is in one of these ways, found from what it was made of, the first ones first:

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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from gossamer.own_loop import layout as lay
from gossamer.own_loop.layout import Layout, Together
from gossamer.own_loop.nodes import below, dims_of, kept, made, name_of, saved, several_kept, signed, sizes_before


class Way(Enum):
    FREE = "free"
    ROWS = "rows"
    ROW = "row"
    SUMMED = "summed"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Place:
    """Where the rows of one tensor are. `row`: which one it is of, and of which tensor."""

    way: Way
    layout: Layout = ()
    row: tuple[int, int] = (0, 0)


FREE, SUMMED, LOST = Place(Way.FREE), Place(Way.SUMMED), Place(Way.LOST)
EACH = Place(Way.SUMMED, row=(1, 0))  # rows that were taken out one by one, and added up


class Origin(ABC):
    """What is known of tensors that have no graph."""

    rows: int  # of this rank

    @abstractmethod
    def layout(self, tensor: Tensor, *, is_input: bool) -> Layout | None:
        """Where a tensor of the loop has rows; None where it has none. `is_input`: what a layer was given has rows,
        however many.
        """

    @abstractmethod
    def layout_of_size(self, sizes: Sequence[int]) -> Layout | None:
        """The same of a tensor that is not there any more."""


@dataclass(frozen=True, slots=True)
class Path:
    """What rows meet with on the way to the losses. `together`: the first step that takes them together, "" where there
    is none; `is_one_by_one`: whether rows were taken out one by one, and what they make was added up. `after`: steps that
    reduce what was reduced over rows before; `before`: those that reduce something else than rows.
    """

    together: str
    is_one_by_one: bool = False
    after: frozenset[Any] = frozenset()
    before: frozenset[Any] = frozenset()


def followed(roots: Sequence[Tensor], origin: Origin) -> Path:
    """The way of all rows to the losses."""
    nodes = [root.grad_fn for root in roots if root.grad_fn is not None]
    flow = _Flow(origin)
    try:
        flow.run(nodes)
    except Together as found:
        return Path(str(found))
    except (LookupError, ValueError, TypeError, AttributeError) as error:  # of a graph that nobody has thought of
        return Path(f"a step that cannot be followed ({error})")
    is_one_by_one = any(flow.places[node] == EACH or flow.places[node].way is Way.ROW for node in nodes)
    return Path("", is_one_by_one, frozenset(flow.after), frozenset(flow.before))


Step = Callable[["_Flow", Any, str, list[Place | None]], Place]


class _Flow:
    """Goes through a graph once, from what has no gradient to the losses."""

    def __init__(self, origin: Origin) -> None:
        self.origin = origin
        self.places: dict[Any, Place] = {}
        self._outputs: dict[tuple[Any, int], Place] = {}  # of steps that make several tensors
        self.after: set[Any] = set()  # reductions of what was reduced over rows
        self.before: set[Any] = set()  # reductions after which there are rows
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
                raise Together(f"a choice of {len(taken)} of {self._rows[key]} rows")

    def _place(self, node: Any) -> Place:
        name = name_of(node)
        if name == "AccumulateGrad":
            return FREE
        inputs = [None if one is None else self.made(one, output) for one, output in node.next_functions]
        if name in _REDUCING and any(one.way is Way.SUMMED for one in _known(inputs)):
            self.after.add(node)
        step = _STEPS.get(name, _other)
        if name not in _ENTERING and not _known(inputs):
            if None not in inputs:
                return FREE
            step = _by_element if name in _BY_ELEMENT else _entered
        found = step(self, node, name, inputs)
        if name in _REDUCING and found.way is Way.ROWS:
            self.before.add(node)
        return found

    def made(self, node: Any, output: int) -> Place:
        found = self._outputs.get((node, output)) or self.places.get(node, LOST)
        if found.way is Way.ROW and name_of(node) == "Unbind":
            self._taken[found.row[0]].add(found.row[1])
        return found

    def put(self, node: Any, output: int, place: Place) -> None:
        """One of several tensors that a step makes."""
        self._outputs[node, output] = _checked(place)

    def row(self, source: Any, index: int, rows: int, *, is_taken: bool = True) -> Place:
        """One of the rows of a source."""
        key = hash(source)
        self._taken.setdefault(key, set()).update([index] if is_taken else [])
        self._rows[key] = rows
        return Place(Way.ROW, row=(key, index))

    def entered_by_size(self, sizes: Sequence[int]) -> Place:
        found = self.origin.layout_of_size(sizes)
        return FREE if found is None else Place(Way.ROWS, found)

    def entered(self, tensor: Tensor | None, sizes: Sequence[int], *, is_input: bool = False) -> Place:
        """A tensor without a graph, or what has its sizes where it is kept out of reach."""
        if tensor is None:
            return self.entered_by_size(sizes)
        found = self.origin.layout(tensor, is_input=is_input)
        return FREE if found is None else Place(Way.ROWS, found)


def _checked(place: Place) -> Place:
    """A single row may be left without a dimension to be in."""
    return LOST if place.way is Way.ROWS and not lay.where(place.layout) else place


# What most steps do with anything but rows.


def _known(inputs: Sequence[Place | None]) -> list[Place]:
    return [one for one in inputs if one is not None and one.way is not Way.FREE]


def _without_layout(name: str, inputs: Sequence[Place | None], *, is_linear: bool) -> Place | None:
    """What is made of sums over rows, single rows, and what cannot be told; None where all that came in is rows."""
    known = _known(inputs)
    ways = {one.way for one in known}
    if Way.SUMMED in ways:
        if not is_linear or ways - {Way.SUMMED, Way.ROW}:
            raise Together(f"{name} of a mean or sum over rows")
        return EACH if Way.ROW in ways or EACH in known else SUMMED
    if Way.LOST in ways:
        return LOST
    if Way.ROW in ways:
        if len({one.row for one in known}) == 1 and ways == {Way.ROW}:
            return known[0]
        if not is_linear or ways != {Way.ROW}:
            raise Together(f"{name} of several rows")
        return EACH
    return None


def _entered(flow: _Flow, node: Any, name: str, inputs: list[Place | None]) -> Place:
    """A step of parameters and something that has no graph."""
    for output in range(1, len(node._input_metadata)):
        flow.put(node, output, flow.entered_by_size(made(node, output)))
    return flow.entered_by_size(made(node))


def _other(flow: _Flow, node: Any, name: str, inputs: list[Place | None]) -> Place:
    """A step that is not known: rows stay apart where they can be seen to be in the same place, or in one place."""
    if (found := _without_layout(name, inputs, is_linear=False)) is not None:
        return found
    return _all_kept(flow, node, name, _known(inputs)[0].layout)


def _all_kept(flow: _Flow, node: Any, name: str, layout: Layout) -> Place:
    """Of all that a step makes: the first in any case, others (statistics, last states) where it can be seen."""
    for output in range(1, len(node._input_metadata)):
        flow.put(node, output, _kept_in(layout, made(node, output)) or LOST)
    if (found := _kept_in(layout, made(node))) is None:
        (at, *_) = lay.where(layout)
        if lay.labels(layout[at])[0].startswith(lay.PART):
            return LOST
        raise Together(name)
    return found


def _kept_in(layout: Layout, sizes: tuple[int, ...]) -> Place | None:
    """Rows in a dimension of the same size, where there is one."""
    (at, *_) = lay.where(layout)
    dims = [dim for dim, found in enumerate(sizes) if found == lay.size_of(layout[at])]
    if at not in dims and len(dims) != 1:
        return None
    return Place(Way.ROWS, _with(lay.plain(sizes), at if at in dims else dims[0], layout[at]))


# Steps number by number.


def _by_element(flow: _Flow, node: Any, name: str, inputs: list[Place | None]) -> Place:
    """Rows of all that comes in must be in the same dimension."""
    is_linear = name in ("Add", "Sub", "Neg", "Where", "MaskedFill") or (
        name in ("Mul", "Div", "Rsub") and _is_multiple(name, inputs)
    )
    if (found := _without_layout(name, inputs, is_linear=is_linear)) is not None:
        return found
    sizes = made(node)
    layouts = [one.layout for one in _known(inputs)]
    if not layouts:
        return _met_first(flow, node, name, sizes)
    if name in ("Mul", "Div") and None in inputs[:2]:
        other = kept(node, "other" if inputs[0] is not None else "self")
        if other is not None and is_normalised(other, layouts[0]):
            raise Together(f"{name} with numbers that were normalised over rows")
        if other is not None and other.dim():
            entered = flow.origin.layout(other, is_input=False)
            layouts += [entered] if entered is not None and _spreads(layouts[0], other.shape, len(sizes)) else []
    elif None in inputs and name in ("Add", "Sub", "Where", "Maximum", "Minimum"):
        _refuse_spread(name, layouts, sizes, _sizes_below(node))
    return Place(Way.ROWS, lay.joined(layouts, sizes, name))


def _is_multiple(name: str, inputs: Sequence[Place | None]) -> bool:
    known = _known(inputs)
    return len(known) == 1 and (name != "Div" or inputs[0] is known[0])


def _met_first(flow: _Flow, node: Any, name: str, sizes: tuple[int, ...]) -> Place:
    """Parameters alone, and something without a graph."""
    if name in ("Mul", "Div"):
        other = kept(node, "other" if below(node)[0] is not None else "self")
        if other is None or not other.dim():
            return FREE
        spreads = _sizes_below(node)[0] != sizes
        return flow.entered(other, sizes, is_input=spreads) if spreads else FREE
    if all(one != sizes for one in _sizes_below(node)):
        return flow.entered_by_size(sizes)
    return FREE


def _sizes_below(node: Any) -> list[tuple[int, ...]]:
    """Of what came in, before it was spread out."""
    found = []
    for one, output in node.next_functions:
        if one is None:
            continue
        while name_of(one) in ("Expand", "Clone") and one.next_functions[0][0] is not None:
            one, output = one.next_functions[0]
        found.append(made(one, output))
    return found


def _spreads(layout: Layout, sizes: Sequence[int], ndim: int) -> bool:
    """Whether a tensor of `sizes` makes a dimension larger than it is."""
    ours = (*(1 for _ in range(ndim - len(layout))), *lay.sizes_of(layout))
    theirs = (*(1 for _ in range(ndim - len(sizes))), *sizes)
    return any(a == 1 < b for a, b in zip(ours, theirs, strict=True))


def _refuse_spread(name: str, layouts: Sequence[Layout], sizes: Sequence[int], known: Sequence[Sequence[int]]) -> None:
    """Something that is out of sight makes a dimension as large as there are rows: it may have rows there."""
    counts = {lay.size_of(layout[at]) for layout in layouts for at in lay.where(layout)} - {1}
    for back in range(1, len(sizes) + 1):
        seen = {one[-back] if back <= len(one) else 1 for one in known}
        if sizes[-back] in counts and seen == {1}:
            raise Together(f"{name} with something that has as many numbers in a dimension of its own as there are rows")


def is_normalised(other: Tensor, layout: Layout) -> bool:
    """Whether numbers of rows have a mean of 0 or 1 over them, as their own statistics make it."""
    (dim, *_) = lay.where(layout)
    back = len(layout) - dim
    if not other.is_floating_point() or back > other.dim() or other.shape[-back] < 2:
        return False
    if other.shape[-back] != lay.size_of(layout[dim]):
        return False
    wide = other.detach().double()
    low, high = float(wide.min()), float(wide.max())
    if low == high or bool((wide == wide.round()).all()) or (low == 0.0 and bool(((wide == 0) | (wide == high)).all())):
        return False  # constants, signs, masks
    return _is_centred(wide, None) or _is_centred(wide, other.dim() - back)


def _is_centred(wide: Tensor, dim: int | None) -> bool:
    mean = wide.mean() if dim is None else wide.mean(dim)
    size = wide.abs().mean() if dim is None else wide.abs().mean(dim)
    is_near = torch.minimum(mean.abs(), (mean - 1).abs()) < 1e-6 * size
    return bool(is_near.all())


def _refuse_standardised(name: str, given: Tensor | None, place: Place) -> None:
    """What a layer is given was normalised over this rank's rows: as a whole, or each of its features."""
    if given is None or place.way is not Way.ROWS or given.dim() < 2 or given.numel() > _LOOKED_THROUGH:
        return
    if is_normalised(given, place.layout) and _has_spread_one(given, place.layout):
        raise Together(f"{name} of numbers that were normalised over rows")


# Steps that view, cut and join.


def _same(flow: _Flow, node: Any, name: str, inputs: list[Place | None]) -> Place:
    return _known(inputs)[0]


def _view(flow: _Flow, node: Any, name: str, inputs: list[Place | None]) -> Place:
    (one,) = _known(inputs)
    if one.way is not Way.ROWS:
        return one
    sizes = made(node)
    if 0 in sizes:
        return LOST
    return Place(Way.ROWS, lay.refolded(one.layout, sizes, flow.origin.rows, name))


def _turn(flow: _Flow, node: Any, name: str, inputs: list[Place | None]) -> Place:
    (one,) = _known(inputs)
    if one.way is not Way.ROWS:
        return one
    old, order = one.layout, list(range(len(one.layout)))
    if name == "Permute":
        order = [signed(dim) % len(old) for dim in node._saved_dims]
    elif name == "T":
        order.reverse()
    else:
        first, second = signed(node._saved_dim0) % len(old), signed(node._saved_dim1) % len(old)
        order[first], order[second] = second, first
    return Place(Way.ROWS, tuple(old[dim] for dim in order))


def _squeeze(flow: _Flow, node: Any, name: str, inputs: list[Place | None]) -> Place:
    (one,) = _known(inputs)
    sizes = made(node)
    if one.way is not Way.ROWS:
        return one
    if name == "Unsqueeze":
        at = signed(node._saved_dim)
        at = at if at >= 0 else at + len(sizes)
        return Place(Way.ROWS, (*one.layout[:at], ((1, ""),), *one.layout[at:]))
    return Place(Way.ROWS, _fitted(one.layout, sizes)) if sizes else LOST


def _fitted(layout: Layout, sizes: Sequence[int]) -> Layout:
    """Dimensions of one number are gone; those with rows last, where they may stay."""
    dims = list(layout)
    gone = len(dims) - len(sizes)
    for is_rows in (False, True):
        for at in range(len(dims) - 1, -1, -1):
            if gone and lay.size_of(dims[at]) == 1 and bool(lay.labels(dims[at])) is is_rows:
                del dims[at]
                gone -= 1
    return tuple(dims)


def _spread(flow: _Flow, node: Any, name: str, inputs: list[Place | None]) -> Place:
    (one,) = _known(inputs)
    sizes = made(node)
    if one.way is not Way.ROWS:
        return one
    old = (*(((1, ""),) for _ in range(len(sizes) - len(one.layout))), *one.layout)
    if name == "Expand":
        grown = (dim if lay.size_of(dim) == size else ((size, lay.SPREAD),) for dim, size in zip(old, sizes, strict=True))
        return Place(Way.ROWS, tuple(grown))
    times = tuple(size // max(1, lay.size_of(dim)) for dim, size in zip(old, sizes, strict=True))
    return Place(Way.ROWS, tuple(((many, ""), *dim) if many > 1 else dim for dim, many in zip(old, times, strict=True)))


def _select(flow: _Flow, node: Any, name: str, inputs: list[Place | None]) -> Place:
    (one,) = _known(inputs)
    if one.way is not Way.ROWS:
        return one
    dim = signed(node._saved_dim) % len(one.layout)
    if not lay.labels(one.layout[dim]):
        return Place(Way.ROWS, lay.without(one.layout, (dim,)))
    source, output = node.next_functions[0]
    rows = lay.size_of(one.layout[dim])
    if name == "Unbind":
        for index in range(rows):
            flow.put(node, index, flow.row((source, output), index, rows, is_taken=False))
        return LOST
    return flow.row((source, output), signed(node._saved_index) % rows, rows)


def _slice(flow: _Flow, node: Any, name: str, inputs: list[Place | None]) -> Place:
    """Rows are cut where whole views of them come out."""
    (one,) = _known(inputs)
    if one.way is not Way.ROWS:
        return one
    dim = signed(node._saved_dim) % len(one.layout)
    if not lay.labels(one.layout[dim]):
        for output in range(len(node._input_metadata)):
            size = made(node, output)[dim]
            flow.put(node, output, Place(Way.ROWS, _with(one.layout, dim, ((size, ""),))))
        return flow.made(node, 0)
    for output in range(len(node._input_metadata)):
        flow.put(node, output, Place(Way.ROWS, _with(one.layout, dim, _cut_to(flow, node, name, one, dim, output))))
    return flow.made(node, 0)


def _cut_to(flow: _Flow, node: Any, name: str, one: Place, dim: int, output: int) -> lay.Dim:
    old, size = one.layout[dim], made(node, output)[dim]
    whole = lay.size_of(old)
    if size == whole:
        return old
    rows = flow.origin.rows
    start, step = 0, 1
    if name == "Slice":
        start, step = signed(node._saved_start), node._saved_step
        start = max(0, start + whole if start < 0 else start)
    is_views = rows > 1 and len(old) == 1 and whole % rows == 0 == size % rows
    if is_views and step == 1 and start % rows == 0 and old[0][1] == lay.ROWS:
        return ((size, lay.ROWS),)
    if lay.labels(old)[0].startswith(lay.PART):
        is_view = is_views and step == 1 and start % rows == 0 and size == rows
        return ((size, f"{lay.PART} views" if is_view else f"{lay.labels(old)[0]}/{start}/{step}"),)
    if is_views and size == rows and step * rows == whole:
        return ((rows, lay.ROWS),)  # every second one, of rows in pairs
    if len(old) > 1 and lay.labels(old[-1:]) and step == 1 and size % old[-1][0] == 0 == start % old[-1][0]:
        return ((size // old[-1][0], ""), old[-1])
    raise Together(name)


def _with(layout: Layout, at: int, dim: lay.Dim) -> Layout:
    return (*layout[:at], dim, *layout[at + 1 :])


def _join(flow: _Flow, node: Any, name: str, inputs: list[Place | None]) -> Place:
    """torch.cat and torch.stack."""
    known, sizes = _known(inputs), made(node)
    if all(one.way is Way.ROW for one in known) and len({one.row for one in known}) == len(inputs) > 1:
        return EACH if sizes == (len(inputs),) else Place(Way.ROWS, lay.with_rows(sizes, signed(node._saved_dim) % len(sizes)))
    if (found := _without_layout(name, inputs, is_linear=True)) is not None:
        return found
    dim = signed(node._saved_dim) % max(1, len(sizes))
    layouts = [one.layout for one in known]
    if name == "Stack":
        layouts = [(*one[:dim], ((1, ""),), *one[dim:]) for one in layouts]
    if not all(lay.labels(one[dim]) for one in layouts):
        if any(lay.labels(one[dim]) for one in layouts):
            raise Together(name)
        return Place(Way.ROWS, lay.joined([_with(one, dim, ((1, ""),)) for one in layouts], sizes, name))
    found_labels = {lay.labels(one[dim]) for one in layouts}
    if len(found_labels) == 1 and not any(one.startswith(lay.ROWS) for one in next(iter(found_labels))):
        label = next(iter(next(iter(found_labels))))
        return Place(Way.ROWS, _with(layouts[0], dim, ((sizes[dim], label),)))
    if len(found_labels) > 1:  # rows that were selected in several ways
        is_part = any(one.startswith(lay.PART) for several in found_labels for one in several)
        label = f"{lay.PART if is_part else lay.ORDERED}/{zlib.crc32(repr(sorted(found_labels)).encode())}"
        return Place(Way.ROWS, _with(layouts[0], dim, ((sizes[dim], label),)))
    first, whole = layouts[0][dim], lay.size_of(layouts[0][dim])
    if sizes[dim] % whole or any(one[dim] != first for one in layouts):
        if flow.origin.rows > 1 and sizes[dim] % flow.origin.rows == 0:
            return Place(Way.ROWS, _with(layouts[0], dim, ((sizes[dim], lay.ROWS),)))
        raise Together(name)
    many = ((sizes[dim] // whole, ""), *first)
    if first == ((whole, lay.ROWS),) and whole == flow.origin.rows > 1:
        many = ((sizes[dim], lay.ROWS),)
    return Place(Way.ROWS, _with(layouts[0], dim, many))


# Steps that pick rows, and put them back.


def _index(flow: _Flow, node: Any, name: str, inputs: list[Place | None]) -> Place:
    one = _known(inputs)[0]
    if one.way is not Way.ROWS:
        return one
    sizes = made(node)
    if name == "IndexSelect":
        given: list[Tensor | None] = [None] * (signed(node._saved_dim) % len(one.layout)) + [kept(node, "index")]
    else:
        given = [one for index in several_kept(node, "indices") for one in _numbers(index)]
    used = [at for at, index in enumerate(given) if index is not None]
    if not used:
        return _all_kept(flow, node, name, one.layout)
    indices = [index for index in given if index is not None]
    shape = torch.broadcast_shapes(*(index.shape for index in indices))
    before = used[0] if used[-1] - used[0] + 1 == len(used) else 0
    untouched = [dim for at, dim in enumerate(one.layout) if at not in used]
    picked: Layout = lay.plain(shape)
    at_rows = [at for at in used if lay.labels(one.layout[at])]
    if at_rows and shape:
        index = given[at_rows[0]]
        assert index is not None
        picked = _picked(one.layout[at_rows[0]], index, tuple(shape))
    elif at_rows:
        source, output = node.next_functions[0]
        index = given[at_rows[0]]
        assert index is not None
        rows = lay.size_of(one.layout[at_rows[0]])
        return flow.row((source, output), int(index) % rows, rows)
    return Place(Way.ROWS, (*untouched[:before], *picked, *untouched[before:]))


def _numbers(index: Tensor | None) -> list[Tensor | None]:
    """A mask as what it lets through, one tensor for each of its dimensions."""
    if index is None or index.dtype not in (torch.bool, torch.uint8):
        return [index]
    return list(index.nonzero(as_tuple=True))


def _picked(dim: lay.Dim, index: Tensor, shape: tuple[int, ...]) -> Layout:
    """The dimensions that an index makes of one with rows."""
    whole = lay.size_of(dim)
    if index.numel() == whole and _is_count(index):  # all of them, one after the other
        own = [at for at, size in enumerate(index.shape) if size == whole]
        back = index.dim() - own[0] if own else 1
        return tuple(dim if len(shape) - at == back else ((size, ""),) for at, size in enumerate(shape))
    return lay.with_rows(shape, _varying(index, len(shape)), _label(index, whole))


def _varying(index: Tensor, ndim: int) -> int:
    """The outermost dimension along which an index is not one number."""
    own = next((at for at, size in enumerate(index.shape) if size > 1), 0)
    return max(0, own + ndim - index.dim())


def _is_count(index: Tensor) -> bool:
    flat = index.flatten()
    return bool((flat == torch.arange(flat.numel(), device=flat.device)).all())


def _label(index: Tensor, whole: int) -> str:
    flat = index.detach().flatten().cpu() % max(1, whole)
    found = zlib.crc32(flat.numpy().tobytes())
    is_mask = bool((flat.diff() >= 0).all())
    is_order = flat.numel() == whole and flat.unique().numel() == whole
    return f"{lay.ORDERED if is_mask or is_order else lay.PICKED}/{found}"


def _put_back(flow: _Flow, node: Any, name: str, inputs: list[Place | None]) -> Place:
    """What was made of picked rows, added in the rows' own places; or something put into other dimensions."""
    if (found := _without_layout(name, inputs, is_linear=True)) is not None:
        return found
    into = inputs[0]
    source = next((one for one in inputs[1:] if one is not None and one.way is Way.ROWS), None)
    if name.startswith(("IndexPut", "UnsafeIndexPut")):
        given = [one for index in several_kept(node, "indices") for one in _numbers(index)]
        dims = [at for at, index in enumerate(given) if index is not None]
        index = given[dims[0]] if dims else None
        dim = dims[0] if dims else 0
    else:
        dim, index = signed(node._saved_dim) % max(1, len(made(node))), kept(node, "index")
    if into is not None and into.way is Way.ROWS and not lay.labels(into.layout[dim]):
        return into
    sizes = made(node)
    if source is None:
        if into is not None and into.way is Way.ROWS:
            return into
        return LOST
    if not any(lay.labels(one) for one in source.layout[dim : dim + 1]):
        return Place(Way.ROWS, lay.joined([_with(source.layout, dim, ((1, ""),))], sizes, name))
    (label, *_) = lay.labels(source.layout[dim])
    whole = sizes[dim]
    if label.startswith(lay.PART):
        return Place(Way.ROWS, lay.with_rows(sizes, dim, lay.ROWS if whole == flow.origin.rows else f"{lay.PART}{whole}"))
    if index is not None and index.dim() > 1:
        index = _of_one_column(index, dim)
    if index is None or index.dim() != 1:
        raise Together(name)
    if label == _label(index, whole) or _is_count(index):
        return Place(Way.ROWS, lay.with_rows(sizes, dim))
    raise Together(name)


def _of_one_column(index: Tensor, dim: int) -> Tensor | None:
    """An index that is the same all over its other dimensions, once."""
    columns = index.movedim(dim, 0).flatten(1)
    return columns[:, 0] if columns.numel() and bool((columns == columns[:, :1]).all()) else None


def _gather(flow: _Flow, node: Any, name: str, inputs: list[Place | None]) -> Place:
    one = _known(inputs)[0]
    if one.way is not Way.ROWS:
        return one
    dim = signed(node._saved_dim) % len(one.layout)
    sizes = made(node)
    if lay.labels(one.layout[dim]):
        raise Together(name)
    if any(lay.size_of(one.layout[at]) != sizes[at] for at in lay.where(one.layout)):
        raise Together(name)
    return Place(Way.ROWS, tuple(old if lay.labels(old) else ((size, ""),) for old, size in zip(one.layout, sizes, strict=True)))


def _masked(flow: _Flow, node: Any, name: str, inputs: list[Place | None]) -> Place:
    one = _known(inputs)[0]
    if one.way is not Way.ROWS:
        return one
    mask = kept(node, "mask")
    bits = 0 if mask is None else zlib.crc32(mask.detach().cpu().contiguous().numpy().tobytes())
    return Place(Way.ROWS, lay.with_rows(made(node), 0, f"{lay.ORDERED}/{bits}"))


def _packed(flow: _Flow, node: Any, name: str, inputs: list[Place | None]) -> Place:
    """The steps of all rows, one after the other."""
    one = _known(inputs)[0]
    return Place(Way.ROWS, lay.with_rows(made(node), 0, f"{lay.PART}ed")) if one.way is Way.ROWS else one


# Steps that make one number, or an order, of several.


def _sum(flow: _Flow, node: Any, name: str, inputs: list[Place | None]) -> Place:
    one = _known(inputs)[0]
    if one.way is not Way.ROWS:
        return one
    sizes = made(node)
    dims = dims_of(node, lay.sizes_of(one.layout))
    if rows := [at for at in dims if lay.labels(one.layout[at]) and not _stays(one.layout, at, dims)]:
        if any(label.startswith(lay.PICKED) for at in rows for label in lay.labels(one.layout[at])):
            raise Together(f"{name} over rows in an order of their own")
        return SUMMED
    return Place(Way.ROWS, _reduced(one.layout, dims, sizes))


def _stays(layout: Layout, at: int, dims: Sequence[int]) -> bool:
    """Whether one row beside other numbers has a dimension to go to."""
    return lay.is_loose(layout[at]) and len(dims) < len(layout)


def _reduced(layout: Layout, dims: Sequence[int], sizes: Sequence[int]) -> Layout:
    return lay.without(layout, dims, keeps=len(sizes) == len(layout))


def _along(flow: _Flow, node: Any, name: str, inputs: list[Place | None]) -> Place:
    """Norms, largest numbers, softmax, orders: along any dimension but that of rows."""
    if (found := _without_layout(name, inputs, is_linear=False)) is not None:
        return found
    one = _known(inputs)[0]
    dims = dims_of(node, lay.sizes_of(one.layout))
    if any(lay.labels(one.layout[at]) and not _stays(one.layout, at, dims) for at in dims):
        raise Together(name)
    for output in range(len(node._input_metadata)):
        sizes = made(node, output)
        if len(sizes) == len(one.layout):
            found_layout = tuple(
                dim if lay.size_of(dim) == size else ((size, ""),) for dim, size in zip(one.layout, sizes, strict=True)
            )
            flow.put(node, output, Place(Way.ROWS, found_layout))
        else:
            flow.put(node, output, Place(Way.ROWS, lay.without(one.layout, dims)))
    return flow.made(node, 0)


def _loss(flow: _Flow, node: Any, name: str, inputs: list[Place | None]) -> Place:
    """A loss of torch's own: classes in the second dimension, or number by number."""
    if (found := _without_layout(name, inputs, is_linear=False)) is not None:
        return found
    layouts = [one.layout for one in _known(inputs)]
    sizes = made(node)
    target = kept(node, "target")
    if target is not None and name == "MseLoss" and is_normalised(target, layouts[0]) and _has_spread_one(target, layouts[0]):
        raise Together(f"{name} with a target that was normalised over rows")
    if not name.startswith(("NllLoss", "Multi")):
        joined = lay.joined(layouts, tuple(torch.broadcast_shapes(*map(lay.sizes_of, layouts))), name)
        return Place(Way.ROWS, joined) if saved(node, "reduction") == 0 else SUMMED
    classes = 0 if len(layouts[0]) == 1 else 1
    if lay.labels(layouts[0][classes]) and not lay.is_loose(layouts[0][classes]):
        raise Together(name)
    return Place(Way.ROWS, lay.without(layouts[0], (classes,))) if sizes else SUMMED


def _has_spread_one(target: Tensor, layout: Layout) -> bool:
    (dim, *_) = lay.where(layout)
    wide = target.detach().double()
    spreads = [wide.std(correction=c) for c in (0, 1)] + [wide.std(dim, correction=c) for c in (0, 1)]
    return any(bool(((one - 1).abs() < 1e-3).all()) for one in spreads)


# Products of matrices, and layers.


def _product(flow: _Flow, node: Any, name: str, inputs: list[Place | None]) -> Place:
    """mm, bmm, mv, addmm, baddbmm."""
    first = {"Addmm": 1, "Baddbmm": 1, "Addmv": 1}.get(name, 0)
    names = ("mat1", "mat2") if name == "Addmm" else ("batch1", "batch2") if name == "Baddbmm" else ("self", "mat2")
    names = ("self", "vec") if name == "Mv" else ("mat", "vec") if name == "Addmv" else names
    pair = [
        one if one is not None else flow.entered(kept(node, named), _sizes_of(node, named), is_input=at == 0)
        for at, (one, named) in enumerate(zip(inputs[first : first + 2], names, strict=True))
    ]
    if inputs[first] is None:
        _refuse_standardised(name, kept(node, names[0]), pair[0])
    if (found := _without_layout(name, [*inputs[:first], *pair], is_linear=len(_known(pair)) < 2)) is not None:
        return found
    sizes = made(node)
    if not _known(pair):
        return _known(inputs)[0] if _known(inputs) else FREE
    left, right = (one.layout if one.way is Way.ROWS else None for one in pair)
    made_layout = _of_product(left, right, sizes, name)
    if name == "Addmm" and first and (bias := inputs[0]) is not None and bias.way is Way.ROWS:
        made_layout = lay.joined([made_layout, bias.layout], sizes, name)
    return Place(Way.ROWS, made_layout)


def _sizes_of(node: Any, named: str) -> tuple[int, ...]:
    return tuple(saved(node, f"{named}_sym_sizes") or ())


def _of_product(left: Layout | None, right: Layout | None, sizes: tuple[int, ...], name: str) -> Layout:
    """(..., i, k) times (..., k, j). Raises Together where rows are summed over, or meet."""
    is_vector = "v" in name.lower()[-1:]
    left = None if left is None else _without_inner(left, len(left) - 1, name)
    right = None if right is None else _without_inner(right, len(right) - (1 if is_vector else 2), name)
    if is_vector:
        return left[:-1] if left is not None else lay.plain(sizes)
    layouts = [one for one in (left, right) if one is not None]
    if left is not None and right is not None and lay.labels(left[-2]) and lay.labels(right[-1]):
        if lay.is_alike(left, right):
            raise Together(name)
        layouts = [left]
    return lay.joined(layouts, sizes, name)


def _without_inner(layout: Layout, at: int, name: str) -> Layout:
    """What is left of a factor whose dimension `at` is summed over."""
    if lay.labels(layout[at]) and not lay.is_loose(layout[at]):
        raise Together(name)
    left = lay.without(layout, (at,))
    return (*left[:at], ((1, ""),), *left[at:])


def _attention(flow: _Flow, node: Any, name: str, inputs: list[Place | None]) -> Place:
    """scaled_dot_product_attention: (..., steps, features)."""
    if (found := _without_layout(name, inputs, is_linear=False)) is not None:
        return found
    known = _known(inputs[:3])
    for one in known:
        if any(lay.labels(dim) and not lay.is_loose(dim) for dim in one.layout[-2:]):
            raise Together(name)
    place = known[0].layout if known else _known(inputs)[0].layout
    sizes = made(node)
    for output in range(1, len(node._input_metadata)):
        flow.put(node, output, LOST)
    flow.put(node, 0, Place(Way.ROWS, (*place[:-2], *lay.plain(sizes[-2:]))))
    return flow.made(node, 0)


def _layer(flow: _Flow, node: Any, name: str, inputs: list[Place | None]) -> Place:
    """Layers whose first dimension is of rows, or that work along the last ones alone."""
    known, sizes = _known(inputs), made(node)
    if inputs and inputs[0] is None:
        named = "indices" if name.startswith("Embedding") else "input"
        given = kept(node, named)
        entered = flow.entered(given, given.shape if given is not None else sizes, is_input=True)
        _refuse_standardised(name, given, entered)
        known = [entered, *known] if entered.way is not Way.FREE else known
    if (found := _without_layout(name, known, is_linear=False)) is not None:
        return found
    return _all_kept(flow, node, name, known[0].layout) if known else FREE


def _embedded(flow: _Flow, node: Any, name: str, inputs: list[Place | None]) -> Place:
    indices, sizes = kept(node, "indices"), made(node)
    entered = flow.entered(indices, sizes[:-1], is_input=True)
    if entered.way is not Way.ROWS:
        return FREE
    if name != "Embedding":
        return flow.entered_by_size(sizes)  # bags of several indices
    return Place(Way.ROWS, (*entered.layout, ((sizes[-1], ""),)))


def _steps() -> dict[str, Step]:
    found: dict[str, Step] = {}
    for step, names in (
        (_by_element, _BY_ELEMENT),
        (_same, {"Clone", "Alias", "ToCopy", "Contiguous", "Conj", "NativeDropout", "LiftFresh", "PinMemory", "Neg"}),
        (_view, {"View", "UnsafeView", "Reshape", "ReshapeAlias"}),
        (_turn, {"Permute", "Transpose", "T"}),
        (_squeeze, {"Squeeze", "Unsqueeze"}),
        (_spread, {"Expand", "Repeat"}),
        (_select, {"Select", "Unbind"}),
        (_slice, {"Slice", "Split", "SplitWithSizes", "Chunk", "UnsafeSplit", "UnsafeSplitWithSizes", "NarrowCopy"}),
        (_join, {"Cat", "Stack"}),
        (_index, {"Index", "IndexSelect", "UnsafeIndex"}),
        (_put_back, {"IndexAdd", "IndexPut", "IndexPutImpl", "ScatterAdd", "ScatterReduce", "IndexReduce", "Scatter", "IndexCopy"}),
        (_gather, {"Gather"}),
        (_masked, {"MaskedSelect"}),
        (_packed, {"PackPaddedSequence"}),
        (_sum, {"Sum", "Mean", "Nansum"}),
        (_along, _ALONG),
        (_loss, _LOSSES),
        (_product, {"Mm", "Bmm", "Mv", "Addmm", "Baddbmm", "Addmv"}),
        (_dot, {"Dot", "Vdot"}),
        (_pairs, {"Cdist", "EuclideanDist", "Pdist"}),
        (_layer, {"Convolution", "NativeLayerNorm", "NativeGroupNorm", "NativeBatchNorm", "Linear", "MkldnnRnnLayer"}),
        (_embedded, {"Embedding", "EmbeddingBag"}),
    ):
        found |= dict.fromkeys(names, step)
    return found | {name: _attention for name in _ATTENTIONS}


def _dot(flow: _Flow, node: Any, name: str, inputs: list[Place | None]) -> Place:
    """A sum over rows of what is multiplied with numbers that have no graph, or with parameters."""
    known = _known(inputs)
    if len(known) > 1 and len(inputs) > 1:
        if (found := _without_layout(name, inputs, is_linear=False)) is not None:
            return found
        lay.joined([one.layout for one in known], lay.sizes_of(known[0].layout), name)
    return SUMMED if known[0].way is Way.ROWS else known[0]


def _pairs(flow: _Flow, node: Any, name: str, inputs: list[Place | None]) -> Place:
    """Distances of every row of one matrix to every row of another."""
    if (found := _without_layout(name, inputs, is_linear=False)) is not None:
        return found
    sizes = made(node)
    given = [
        one if one is not None else flow.entered(kept(node, named), (), is_input=False)
        for one, named in zip((*inputs, None)[:2], ("x1", "x2"), strict=False)
    ]
    known = [one for one in given if one.way is Way.ROWS]
    if name == "Pdist" or any(lay.labels(one.layout[-1]) and not lay.is_loose(one.layout[-1]) for one in known):
        raise Together(name)
    if len(known) == 2 and all(lay.labels(one.layout[-2]) for one in known) and lay.is_alike(known[0].layout, known[1].layout):
        raise Together(name)
    turned = [
        (*one.layout[:-2], one.layout[-2], ((1, ""),)) if one is given[0] else (*one.layout[:-2], ((1, ""),), one.layout[-2])
        for one in known
    ]
    return Place(Way.ROWS, lay.joined(turned, sizes, name))


_LOOKED_THROUGH = 1 << 22  # numbers of one tensor
_REDUCING = ("Sum", "Mean", "Nansum", "Dot")
_ENTERING = {
    *("Mm", "Bmm", "Mv", "Addmm", "Baddbmm", "Addmv", "Convolution", "Embedding", "EmbeddingBag", "NativeLayerNorm"),
    *("NativeGroupNorm", "NativeBatchNorm", "Linear", "MkldnnRnnLayer"),
}
_BY_ELEMENT = {
    *("Add", "Sub", "Mul", "Div", "Rsub", "Maximum", "Minimum", "Pow", "Exp", "Exp2", "Expm1", "Log", "Log2", "Log10"),
    *("Log1P", "Abs", "Sqrt", "Rsqrt", "Reciprocal", "Sign", "Sgn", "Sigmoid", "LogSigmoid", "Tanh", "Relu", "Gelu", "Silu"),
    *("Softplus", "Clamp", "ClampMin", "ClampMax", "Sin", "Cos", "Tan", "Asin", "Acos", "Atan", "Atan2", "Sinh", "Cosh"),
    *("Asinh", "Acosh", "Atanh", "Erf", "Erfc", "Erfinv", "Lgamma", "Digamma", "Where", "MaskedFill", "Elu", "Celu"),
    *("LeakyRelu", "PreluKernel", "Hardtanh", "Hardswish", "Hardsigmoid", "Hardshrink", "Softshrink", "Mish", "Threshold"),
    *("Addcmul", "Addcdiv", "Lerp", "Xlogy", "SpecialXlog1Py", "SpecialEntr", "Logaddexp", "Logaddexp2", "Hypot", "Sinc"),
    *("Fmax", "Fmin", "Fmod", "Remainder", "Floor", "Ceil", "Round", "Trunc", "Frac", "NanToNum", "Logit", "Copysign"),
    *("I0", "SpecialI0E", "SpecialI1", "SpecialI1E", "Polygamma", "Mvlgamma", "RreluWithNoise"),
}
_ALONG = {
    *("Prod", "Std", "Var", "StdMean", "VarMean", "Norm", "LinalgVectorNorm", "Max", "Min", "Amax", "Amin", "Aminmax"),
    *("Topk", "Sort", "SortStable", "Median", "Nanmedian", "Kthvalue", "Mode", "Quantile", "Cumsum", "Cumprod", "Logsumexp"),
    *("LogSoftmax", "Softmax", "SafeSoftmax", "MaskedSoftmax", "Roll", "Flip", "Cummax", "Cummin", "Logcumsumexp"),
}
_LOSSES = {
    *("NllLoss", "NllLoss2D", "MseLoss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits"),
    *("SoftMarginLoss", "MultiMarginLoss", "MultilabelMarginLoss"),
}
_ATTENTIONS = {
    *("ScaledDotProductFlashAttention", "ScaledDotProductFlashAttentionForCpu", "ScaledDotProductEfficientAttention"),
    *("ScaledDotProductCudnnAttention", "ScaledDotProductFusedAttentionOverrideable"),
}
_STEPS = _steps()
