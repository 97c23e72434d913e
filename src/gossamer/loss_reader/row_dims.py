"""The row dimensions of a tensor: which dimensions have rows of a batch, tracked through transposes, folds and unfolds.

A dimension is a product of factors, from the outer one to the inner one: (rows * heads) of an attention with time first
has two. A factor with rows has a label: two tensors with one label have the same rows in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, prod
from typing import TypeAlias

ROWS = "rows"  # of the batch, or several views of them one after the other
PART = "part"  # of unknown origin: rows selected outside of the graph, or constants
ORDERED = "ordered"  # selected rows, each once, in the order of the batch, or all of them in another
PICKED = "picked"  # selected rows in another order
SPREAD = "*"  # no rows: an element, or one of each row, that was repeated

Factor: TypeAlias = tuple[int, str]
Dim: TypeAlias = tuple[Factor, ...]
RowDims: TypeAlias = tuple[Dim, ...]


class RowsMixed(Exception):
    """The error of a graph node that mixes the rows of a batch."""


class RowsLost(Exception):
    """The error of a graph node whose output has rows in unknown dimensions."""


def plain(sizes: Sequence[int]) -> RowDims:
    """Return the layout of a tensor without rows."""
    return tuple(((size, ""),) for size in sizes)


def with_rows(sizes: Sequence[int], dim: int, label: str = ROWS) -> RowDims:
    """Return the layout of a tensor with rows of one label in dimension `dim`."""
    return tuple(((size, label if at == dim else ""),) for at, size in enumerate(sizes))


def labels(dim: Dim) -> tuple[str, ...]:
    """Return the row labels of a dimension, the outer first."""
    return tuple(label for _, label in dim if label and label != SPREAD)


def is_narrow(dim: Dim) -> bool:
    """Return whether a dimension has one element, repeated or not."""
    return all(size == 1 or label == SPREAD for size, label in dim)


def size_of(dim: Dim) -> int:
    """Return the size of a dimension: the product of its factors."""
    return prod(size for size, _ in dim)


def sizes_of(layout: RowDims) -> tuple[int, ...]:
    """Return the sizes of a layout."""
    return tuple(size_of(dim) for dim in layout)


def where(layout: RowDims) -> tuple[int, ...]:
    """Return the dimensions that have rows."""
    return tuple(at for at, dim in enumerate(layout) if labels(dim))


def is_loose(dim: Dim) -> bool:
    """Return whether a dimension has one row beside other elements: operations along it do not mix rows."""
    return bool(labels(dim)) and prod(size for size, label in dim if label not in ("", SPREAD)) == 1 < size_of(dim)


def stripped(layout: RowDims, at: int) -> RowDims:
    """Return the layout without rows in dimension `at`."""
    return (*layout[:at], ((size_of(layout[at]), ""),), *layout[at + 1 :])


def without(layout: RowDims, dims: Sequence[int], *, keeps: bool = False) -> RowDims:
    """Return the layout without the dimensions `dims`, or with size 1 in each if `keeps`.

    A single row beside other elements in a removed dimension moves to the neighboring dimension.
    """
    found: list[Dim] = []
    waiting: Dim = ()
    for at, dim in enumerate(layout):
        if at not in dims:
            found.append((*waiting, *dim))
            waiting = ()
            continue
        loose = tuple(one for one in dim if labels((one,)))
        if keeps:
            found.append(loose or ((1, ""),))
        elif found:
            found[-1] = (*found[-1], *loose)
        else:
            waiting = loose
    return tuple(found)


def refolded(layout: RowDims, sizes: Sequence[int], rows: int, name: str) -> RowDims:
    """Return the layout of a view as a tensor of `sizes`. Raises RowsMixed or RowsLost if the view splits rows
    apart.
    """
    left = [one for dim in layout for one in dim if one[0] != 1 or labels((one,))]
    own = _place_of_one(left, sizes, sum(size_of(dim) == 1 and not labels(dim) for dim in layout))
    one = (left.pop(own[0]),) if own is not None else ()
    found = [_taken(left, size, rows, name, is_last=at == len(sizes) - 1) for at, size in enumerate(sizes)]
    if own is not None:
        found[own[1]] = one
    return tuple(found)


def _place_of_one(left: Sequence[Factor], sizes: Sequence[int], narrow: int) -> tuple[int, int] | None:
    """Return (factor, dimension) of a single row that gets a dimension of its own: the one in its place, else the
    first.

    `narrow`: number of earlier dimensions of size 1 without rows, which may be the ones that exist now.
    """
    places = [at for at, size in enumerate(sizes) if size == 1]
    at = next((at for at, (size, _) in enumerate(left) if size == 1), None)
    if at is None or not places:
        return None
    before = prod(size for size, _ in left[:at])
    fitting = [place for place in places if prod(sizes[:place]) == before]
    if not fitting and len(places) <= narrow:
        return None
    return at, (fitting or places)[0]


def _taken(left: list[Factor], need: int, rows: int, name: str, *, is_last: bool) -> Dim:
    """Remove the factors of one dimension of size `need` from `left`, and return them."""
    mine: list[Factor] = []
    while left and (need > 1 or is_last):
        size, label = left.pop(0)
        if need % size == 0:
            mine.append((size, label))
            need //= size
            continue
        if gcd(size, need) == 1:
            left.insert(0, _as_one((size, label), left, rows, name))
            continue
        outer, inner = _cut((size, label), gcd(size, need), rows, name)
        mine.append(outer)
        left.insert(0, inner)
        need //= outer[0]
    return tuple(mine) or ((1, ""),)


def _as_one(one: Factor, left: list[Factor], rows: int, name: str) -> Factor:
    """Return the product of a factor and the next one, if neither has rows."""
    if one[1] in ("", SPREAD) and left and left[0][1] in ("", SPREAD):
        size, label = left.pop(0)
        return one[0] * size, one[1] if one[1] == label else ""
    if rows > 1 and one[1] == ROWS:
        raise RowsMixed(name)
    raise RowsLost(name)


def _cut(one: Factor, outer: int, rows: int, name: str) -> tuple[Factor, Factor]:
    """Split a factor in two, of which one has the rows."""
    label, inner = one[1], one[0] // outer
    if label in ("", SPREAD):
        return (outer, label), (inner, label)
    if outer == rows:
        return (outer, _unfolded(label)), (inner, "")
    if inner == rows:
        return (outer, ""), (inner, _unfolded(label))
    if label != ROWS or (rows and outer % rows == 0):
        return (outer, label), (inner, "")
    if rows and inner % rows == 0:
        return (outer, ""), (inner, label)
    raise RowsMixed(name)


def _unfolded(label: str) -> str:
    """Return the label of rows unfolded to the batch's number of rows: they are those of the batch."""
    return ROWS if label.startswith(PART) else label


def joined(layouts: Sequence[RowDims], sizes: Sequence[int], name: str) -> RowDims:
    """Return the layout of an elementwise result of tensors broadcast to `sizes`.

    Raises RowsMixed if the rows of two tensors are in different dimensions, or in another order.
    """
    spread = sorted((_spread(layout, len(sizes)) for layout in layouts), key=is_part)
    if any(_crosses(one, other) for at, one in enumerate(spread) for other in spread[:at]):
        raise RowsMixed(name)
    found, *others = spread
    for layout in others:
        found = _met(found, layout, name)
    return tuple(dim if size_of(dim) == size else ((size, ""),) for dim, size in zip(found, sizes, strict=True))


def is_part(layout: RowDims) -> bool:
    """Return whether all labels may be of constant data, so that other tensors decide where rows are."""
    return all(label.startswith(PART) for dim in layout for label in labels(dim))


def _spread(layout: RowDims, ndim: int) -> RowDims:
    return (*(((1, ""),) for _ in range(ndim - len(layout))), *layout)


def _met(first: RowDims, second: RowDims, name: str) -> RowDims:
    ours, theirs = set(where(first)), set(where(second))
    is_kept = bool(ours) and not ours & theirs  # equal size alone does not make it a row dimension
    return tuple(_dim_met(a, b, name, is_kept=is_kept) for a, b in zip(first, second, strict=True))


def _dim_met(first: Dim, second: Dim, name: str, *, is_kept: bool) -> Dim:
    if labels(first) and labels(second):
        return _same(first, second, name)
    if labels(first):
        return first
    if labels(second):
        return ((size_of(second), ""),) if is_kept else second
    return second if is_narrow(first) else first


def _crosses(first: RowDims, second: RowDims) -> bool:
    """Return whether rows in a column are combined with rows in a line: every pair of rows."""
    return is_alike(first, second) and _is_across(first, second)


def _is_across(first: RowDims, second: RowDims) -> bool:
    """Return whether labels of one layout in a column are combined with labels of the other in a line."""
    ours, theirs = set(where(first)), set(where(second))
    if not ours or not theirs or ours & theirs:
        return False
    if all(is_loose(first[at]) for at in ours) and all(is_loose(second[at]) for at in theirs):
        return False
    return all(is_narrow(second[at]) for at in ours) and all(is_narrow(first[at]) for at in theirs)


def _same(first: Dim, second: Dim, name: str) -> Dim:
    """Return the common form of one dimension in which both tensors have rows."""
    if first == second:
        return first
    if labels(first)[0].startswith(PART) or labels(second)[0].startswith(PART):
        return second if labels(first)[0].startswith(PART) else first
    if labels(first) != labels(second):
        raise RowsMixed(name)
    return first if len(first) >= len(second) else second


def strangers(layouts: Sequence[RowDims], ndim: int) -> set[str]:
    """Return the labels of data of unknown origin that broadcasting combines with every row.

    `ndim`: number of dimensions of the result. Such data must be equal on all ranks.
    """
    spread = [_spread(layout, ndim) for layout in layouts]
    across = ((one, two) for at, one in enumerate(spread) for two in spread[:at] if _is_across(one, two))
    return {label for one, two in across if not is_alike(one, two) for label in parts_of((*one, *two))}


def parts_of(dims: Sequence[Dim]) -> set[str]:
    """Return the labels of data of unknown origin, without later slices."""
    return {label.split("/")[0] for dim in dims for label in labels(dim) if label.startswith(PART)}


def is_alike(first: RowDims, second: RowDims) -> bool:
    """Return whether both layouts have rows of the batch, or the same data of unknown origin."""
    ours = {label for dim in first for label in labels(dim)}
    theirs = {label for dim in second for label in labels(dim)}
    is_part = any(label.startswith(PART) for label in ours | theirs)
    return bool(ours & theirs) if is_part else bool(ours and theirs)
