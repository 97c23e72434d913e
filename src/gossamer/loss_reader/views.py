"""Views, transposes, slices and concatenations."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from gossamer.loss_reader import row_dims as lay
from gossamer.loss_reader.graph_nodes import made, saved, signed
from gossamer.loss_reader.row_dims import RowDims, RowsLost, RowsMixed
from gossamer.loss_reader.row_flow import (
    EACH,
    LOST,
    GraphStep,
    RowFlow,
    RowPath,
    RowPlace,
    known_of,
    need_layouts,
    with_dim,
)


def _same(flow: RowFlow, node: Any, name: str, inputs: list[RowPlace | None]) -> RowPlace:
    return known_of(inputs)[0]


def _view(flow: RowFlow, node: Any, name: str, inputs: list[RowPlace | None]) -> RowPlace:
    (one,) = known_of(inputs)
    if one.way is not RowPath.ROWS:
        return one
    sizes = made(node)
    if 0 in sizes:
        return LOST
    found = lay.refolded(one.layout, sizes, flow.origin.rows, name)
    if flow.origin.rows == 1:
        flow.is_unfolded |= any(map(lay.is_loose, one.layout)) and not any(map(lay.is_loose, found))
        flow.is_guessed |= any(map(lay.is_loose, one.layout)) and sizes.count(1) > 1
    return RowPlace(RowPath.ROWS, found)


def _strided(flow: RowFlow, node: Any, name: str, inputs: list[RowPlace | None]) -> RowPlace:
    """Return the place of a contiguous view of all elements, such as the view of a tensor written in place."""
    sizes, strides = made(node), [1]
    for size in sizes[:0:-1]:
        strides.insert(0, strides[0] * size)
    (one,) = known_of(inputs)
    if one.way is not RowPath.ROWS:
        return one
    if tuple(saved(node, "stride") or ()) != tuple(strides) or prod(sizes) != prod(lay.sizes_of(one.layout)):
        return LOST
    return _view(flow, node, name, inputs)


def _turn(flow: RowFlow, node: Any, name: str, inputs: list[RowPlace | None]) -> RowPlace:
    (one,) = known_of(inputs)
    if one.way is not RowPath.ROWS:
        return one
    old, order = one.layout, list(range(len(one.layout)))
    if name == "Permute":
        order = [signed(dim) % len(old) for dim in node._saved_dims]
    elif name == "T":
        order.reverse()
    else:
        first, second = signed(node._saved_dim0) % len(old), signed(node._saved_dim1) % len(old)
        order[first], order[second] = second, first
    return RowPlace(RowPath.ROWS, tuple(old[dim] for dim in order))


def _squeeze(flow: RowFlow, node: Any, name: str, inputs: list[RowPlace | None]) -> RowPlace:
    (one,) = known_of(inputs)
    sizes = made(node)
    if one.way is not RowPath.ROWS:
        return one
    if name == "Unsqueeze":
        at = signed(node._saved_dim)
        at = at if at >= 0 else at + len(sizes)
        return RowPlace(RowPath.ROWS, (*one.layout[:at], ((1, ""),), *one.layout[at:]))
    return RowPlace(RowPath.ROWS, _fitted(one.layout, sizes)) if sizes else LOST


def _fitted(layout: RowDims, sizes: Sequence[int]) -> RowDims:
    """Return the layout without dimensions of size 1; one with rows is removed last."""
    dims = list(layout)
    gone = len(dims) - len(sizes)
    for is_rows in (False, True):
        for at in range(len(dims) - 1, -1, -1):
            if gone and lay.size_of(dims[at]) == 1 and bool(lay.labels(dims[at])) is is_rows:
                del dims[at]
                gone -= 1
    return tuple(dims)


def _spread(flow: RowFlow, node: Any, name: str, inputs: list[RowPlace | None]) -> RowPlace:
    (one,) = known_of(inputs)
    sizes = made(node)
    if one.way is not RowPath.ROWS:
        return one
    old = (*(((1, ""),) for _ in range(len(sizes) - len(one.layout))), *one.layout)
    if name == "Expand":
        grown = (
            dim if lay.size_of(dim) == size else ((size, lay.SPREAD),) for dim, size in zip(old, sizes, strict=True)
        )
        return RowPlace(RowPath.ROWS, tuple(grown))
    times = tuple(size // max(1, lay.size_of(dim)) for dim, size in zip(old, sizes, strict=True))
    return RowPlace(
        RowPath.ROWS, tuple(((many, ""), *dim) if many > 1 else dim for dim, many in zip(old, times, strict=True))
    )


def _select(flow: RowFlow, node: Any, name: str, inputs: list[RowPlace | None]) -> RowPlace:
    (one,) = known_of(inputs)
    if one.way is not RowPath.ROWS:
        return one
    dim = signed(node._saved_dim) % len(one.layout)
    if not lay.labels(one.layout[dim]):
        return RowPlace(RowPath.ROWS, lay.without(one.layout, (dim,)))
    source, output = node.next_functions[0]
    rows = lay.size_of(one.layout[dim])
    if name == "Unbind":
        for index in range(rows):
            flow.put(node, index, flow.row((source, output), index, rows, is_taken=False))
        return LOST
    return flow.row((source, output), signed(node._saved_index) % rows, rows)


def _slice(flow: RowFlow, node: Any, name: str, inputs: list[RowPlace | None]) -> RowPlace:
    """Return the place of slices; rows may be sliced between whole views of the batch."""
    (one,) = known_of(inputs)
    if one.way is not RowPath.ROWS:
        return one
    dim = signed(node._saved_dim) % len(one.layout)
    if not lay.labels(one.layout[dim]):
        for output in range(len(node._input_metadata)):
            size = made(node, output)[dim]
            flow.put(node, output, RowPlace(RowPath.ROWS, with_dim(one.layout, dim, ((size, ""),))))
        return flow.made(node, 0)
    for output in range(len(node._input_metadata)):
        before = sum(made(node, at)[dim] for at in range(output))
        cut = _cut_to(flow, node, name, one, dim, output, before)
        flow.put(node, output, RowPlace(RowPath.ROWS, with_dim(one.layout, dim, cut)))
    return flow.made(node, 0)


def _cut_to(flow: RowFlow, node: Any, name: str, one: RowPlace, dim: int, output: int, before: int) -> lay.Dim:
    """Return one slice of a dimension with rows. `before`: elements of the dimension in earlier outputs of the node."""
    old, size = one.layout[dim], made(node, output)[dim]
    whole = lay.size_of(old)
    if size == whole:
        return old
    rows = flow.origin.rows
    if lay.is_loose(old):
        return ((1, lay.ROWS), (size, ""))
    start, step = before, 1
    if name == "Slice":
        start, step = signed(node._saved_start), node._saved_step
        start = max(0, start + whole if start < 0 else start)
    is_views = len(old) == 1 and whole % rows == 0 == size % rows
    if is_views and step == 1 and start % rows == 0 and old[0][1] == lay.ROWS:
        return ((size, lay.ROWS),)
    if lay.labels(old)[0].startswith(lay.PART):
        is_view = is_views and step == 1 and start % rows == 0 and size == rows
        return ((size, f"{lay.PART} views" if is_view else f"{lay.labels(old)[0]}/{start}/{step}"),)
    if is_views and size == rows and step * rows == whole:
        return ((rows, lay.ROWS),)  # one view of each row, from interleaved views
    if len(old) > 1 and lay.labels(old[-1:]) and step == 1 and size % old[-1][0] == 0 == start % old[-1][0]:
        return ((size // old[-1][0], ""), old[-1])
    if len(old) == 1 and old[0][1] == lay.ROWS:
        raise RowsMixed(name)
    numbers = flow.numbers.of(old)
    if numbers is None:
        raise RowsLost(name)
    return flow.numbers.dim(numbers[start::step][:size])


def _join(flow: RowFlow, node: Any, name: str, inputs: list[RowPlace | None]) -> RowPlace:
    """Return the place of torch.cat and torch.stack."""
    known, sizes = known_of(inputs), made(node)
    if all(one.way is RowPath.ROW for one in known) and len({one.row for one in known}) == len(inputs) > 1:
        return (
            EACH
            if sizes == (len(inputs),)
            else RowPlace(RowPath.ROWS, lay.with_rows(sizes, signed(node._saved_dim) % len(sizes)))
        )
    need_layouts(name, inputs, is_linear=True)
    dim = signed(node._saved_dim) % max(1, len(sizes))
    layouts = [one.layout for one in known]
    if name == "Stack":
        layouts = [(*one[:dim], ((1, ""),), *one[dim:]) for one in layouts]
    if not all(lay.labels(one[dim]) for one in layouts):
        if any(lay.labels(one[dim]) for one in layouts):
            raise RowsMixed(name)
        return RowPlace(RowPath.ROWS, lay.joined([with_dim(one, dim, ((1, ""),)) for one in layouts], sizes, name))
    if (numbers := _numbers_of(flow, [one[dim] for one in layouts])) is not None:
        return RowPlace(RowPath.ROWS, with_dim(layouts[0], dim, flow.numbers.dim(numbers)))
    found_labels = {lay.labels(one[dim]) for one in layouts}
    if len(found_labels) == 1 and not any(one.startswith(lay.ROWS) for one in next(iter(found_labels))):
        label = next(iter(next(iter(found_labels))))
        return RowPlace(RowPath.ROWS, with_dim(layouts[0], dim, ((sizes[dim], label),)))
    if len(found_labels) > 1:  # rows that were selected in several ways
        raise RowsLost(name)
    first, whole = layouts[0][dim], lay.size_of(layouts[0][dim])
    if sizes[dim] % whole or any(one[dim] != first for one in layouts):
        if (numbers := _all_numbers(flow, [one[dim] for one in layouts])) is None:
            raise RowsLost(name)
        return RowPlace(RowPath.ROWS, with_dim(layouts[0], dim, flow.numbers.dim(numbers)))
    many = ((sizes[dim] // whole, ""), *first)
    if first == ((whole, lay.ROWS),) and whole == flow.origin.rows:
        many = ((sizes[dim], lay.ROWS),)
    return RowPlace(RowPath.ROWS, with_dim(layouts[0], dim, many))


def _numbers_of(flow: RowFlow, dims: Sequence[lay.Dim]) -> Tensor | None:
    """Return the row numbers of concatenated selections; None if the rows were not selected."""
    if all(label == lay.ROWS for dim in dims for label in lay.labels(dim)):
        return None
    return _all_numbers(flow, dims)


def _all_numbers(flow: RowFlow, dims: Sequence[lay.Dim]) -> Tensor | None:
    known = [numbers for dim in dims if (numbers := flow.numbers.of(dim)) is not None]
    return torch.cat(known) if len(known) == len(dims) else None


STEPS: dict[str, GraphStep] = {
    **dict.fromkeys(
        ("Clone", "Alias", "ToCopy", "Contiguous", "Conj", "NativeDropout", "LiftFresh", "PinMemory"), _same
    ),
    **dict.fromkeys(("Neg", "NativeDropout"), _same),
    **dict.fromkeys(("View", "UnsafeView", "Reshape", "ReshapeAlias"), _view),
    "AsStrided": _strided,
    **dict.fromkeys(("Permute", "Transpose", "T"), _turn),
    **dict.fromkeys(("Squeeze", "Unsqueeze"), _squeeze),
    **dict.fromkeys(("Expand", "Repeat"), _spread),
    **dict.fromkeys(("Select", "Unbind"), _select),
    **dict.fromkeys(("Slice", "NarrowCopy", "Split", "SplitWithSizes", "Chunk"), _slice),
    **dict.fromkeys(("UnsafeSplit", "UnsafeSplitWithSizes"), _slice),
    **dict.fromkeys(("Cat", "Stack"), _join),
}
