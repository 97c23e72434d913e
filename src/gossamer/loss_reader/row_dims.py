"""Which dimensions of a tensor have rows of a batch, through everything that turns, folds and unfolds it.

A dimension is a product of factors, from the outer one to the inner one: (rows * heads) of an attention with time first
is two. A factor has a label where it has rows: two tensors with one label have the same rows in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, prod
from typing import TypeAlias

ROWS = "rows"  # of the batch, or several views of them one after the other
PART = "part"  # of other data: rows that were selected before the graph began, or something constant
ORDERED = "ordered"  # selected rows, each once, in the order of the batch, or all of them in another
PICKED = "picked"  # rows in an order of their own
SPREAD = "*"  # no rows: one number, or one of each row, that was repeated

Factor: TypeAlias = tuple[int, str]
Dim: TypeAlias = tuple[Factor, ...]
RowDims: TypeAlias = tuple[Dim, ...]


class RowsTogether(Exception):
    """A step that takes the rows of a batch together."""


class RowsLost(Exception):
    """A step after which nobody can tell where rows are."""


def plain(sizes: Sequence[int]) -> RowDims:
    return tuple(((size, ""),) for size in sizes)


def with_rows(sizes: Sequence[int], dim: int, label: str = ROWS) -> RowDims:
    return tuple(((size, label if at == dim else ""),) for at, size in enumerate(sizes))


def labels(dim: Dim) -> tuple[str, ...]:
    return tuple(label for _, label in dim if label and label != SPREAD)


def is_narrow(dim: Dim) -> bool:
    """Whether it is of one number, repeated or not."""
    return all(size == 1 or label == SPREAD for size, label in dim)


def size_of(dim: Dim) -> int:
    return prod(size for size, _ in dim)


def sizes_of(layout: RowDims) -> tuple[int, ...]:
    return tuple(size_of(dim) for dim in layout)


def where(layout: RowDims) -> tuple[int, ...]:
    """The dimensions that have rows."""
    return tuple(at for at, dim in enumerate(layout) if labels(dim))


def is_loose(dim: Dim) -> bool:
    """Whether its rows are one row beside something else: then nothing is done to rows by what is done to it."""
    return bool(labels(dim)) and prod(size for size, label in dim if label not in ("", SPREAD)) == 1 < size_of(dim)


def stripped(layout: RowDims, at: int) -> RowDims:
    """A layout whose dimension `at` has no rows."""
    return (*layout[:at], ((size_of(layout[at]), ""),), *layout[at + 1 :])


def without(layout: RowDims, dims: Sequence[int], *, keeps: bool = False) -> RowDims:
    """A layout without some dimensions, or with one number in each. One row that was beside something else in one of
    them goes to its neighbour.
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
    """Its layout when it is viewed as a tensor of `sizes`. Raises Together where rows are torn apart."""
    left = [one for dim in layout for one in dim if one[0] != 1 or labels((one,))]
    own = _place_of_one(left, sizes, sum(size_of(dim) == 1 and not labels(dim) for dim in layout))
    one = (left.pop(own[0]),) if own is not None else ()
    found = [_taken(left, size, rows, name, is_last=at == len(sizes) - 1) for at, size in enumerate(sizes)]
    if own is not None:
        found[own[1]] = one
    return tuple(found)


def _place_of_one(left: Sequence[Factor], sizes: Sequence[int], narrow: int) -> tuple[int, int] | None:
    """(factor, dimension) of one row that gets a dimension of its own: the one in its place, else the first. `narrow`:
    dimensions of one number that there were beside it, which may be those there are now.
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
    """What of `left` makes one dimension of `need`."""
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
    """A factor and the next one, where neither has rows: one of both."""
    if one[1] in ("", SPREAD) and left and left[0][1] in ("", SPREAD):
        size, label = left.pop(0)
        return one[0] * size, one[1] if one[1] == label else ""
    if rows > 1 and one[1] == ROWS:
        raise RowsTogether(name)
    raise RowsLost(name)


def _cut(one: Factor, outer: int, rows: int, name: str) -> tuple[Factor, Factor]:
    """A factor as two, of which one has the rows."""
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
    raise RowsTogether(name)


def _unfolded(label: str) -> str:
    """Rows that come out of a fold in their own number are those of the batch."""
    return ROWS if label.startswith(PART) else label


def joined(layouts: Sequence[RowDims], sizes: Sequence[int], name: str) -> RowDims:
    """Of what is made number by number of tensors that are spread to `sizes`. Raises Together where the rows of one
    meet those of another in another dimension, or in another order.
    """
    spread = sorted((_spread(layout, len(sizes)) for layout in layouts), key=is_part)
    if any(_crosses(one, other) for at, one in enumerate(spread) for other in spread[:at]):
        raise RowsTogether(name)
    found, *others = spread
    for layout in others:
        found = _met(found, layout, name)
    return tuple(dim if size_of(dim) == size else ((size, ""),) for dim, size in zip(found, sizes, strict=True))


def is_part(layout: RowDims) -> bool:
    """Whether all that it has may be something constant: then the rows of others are where they are."""
    return all(label.startswith(PART) for dim in layout for label in labels(dim))


def _spread(layout: RowDims, ndim: int) -> RowDims:
    return (*(((1, ""),) for _ in range(ndim - len(layout))), *layout)


def _met(first: RowDims, second: RowDims, name: str) -> RowDims:
    ours, theirs = set(where(first)), set(where(second))
    is_kept = bool(ours) and not ours & theirs  # a dimension of as many numbers as there are rows is not of rows
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
    """Whether rows in a column meet rows in a line: every pair of them."""
    return is_alike(first, second) and _is_across(first, second)


def _is_across(first: RowDims, second: RowDims) -> bool:
    """Whether what has a label in a column meets what has one in a line."""
    ours, theirs = set(where(first)), set(where(second))
    if not ours or not theirs or ours & theirs:
        return False
    if all(is_loose(first[at]) for at in ours) and all(is_loose(second[at]) for at in theirs):
        return False
    return all(is_narrow(second[at]) for at in ours) and all(is_narrow(first[at]) for at in theirs)


def _same(first: Dim, second: Dim, name: str) -> Dim:
    """One dimension in which both have rows."""
    if first == second:
        return first
    if labels(first)[0].startswith(PART) or labels(second)[0].startswith(PART):
        return second if labels(first)[0].startswith(PART) else first
    if labels(first) != labels(second):
        raise RowsTogether(name)
    return first if len(first) >= len(second) else second


def strangers(layouts: Sequence[RowDims], ndim: int) -> set[str]:
    """Labels of parts that meet other rows, each of them every one of these, where they are spread over each other."""
    spread = [_spread(layout, ndim) for layout in layouts]
    across = ((one, two) for at, one in enumerate(spread) for two in spread[:at] if _is_across(one, two))
    return {label for one, two in across if not is_alike(one, two) for label in parts_of((*one, *two))}


def parts_of(dims: Sequence[Dim]) -> set[str]:
    """The parts that something was entered as, whatever was cut of them since."""
    return {label.split("/")[0] for dim in dims for label in labels(dim) if label.startswith(PART)}


def is_alike(first: RowDims, second: RowDims) -> bool:
    """Whether both have rows of the batch, or the same part."""
    ours = {label for dim in first for label in labels(dim)}
    theirs = {label for dim in second for label in labels(dim)}
    is_part = any(label.startswith(PART) for label in ours | theirs)
    return bool(ours & theirs) if is_part else bool(ours and theirs)
