"""Dims through views and copies: which dims an operator of layout gives, and of which of its input's each is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from gossamer.model.structure.dimension import Clash, Dimension, product_of, sliced, viewed

Dims: TypeAlias = tuple[Dimension, ...]
# The dims of the result, and by dim the input's dim that it is (None: none); None where that is not known.
Layout: TypeAlias = tuple[Sequence[Dimension], Sequence["int | None"] | None]


def _same(dims: Dims, args: Any, kwargs: Any, shape: tuple[int, ...]) -> Layout:
    return dims, range(len(dims))


def _view(dims: Dims, args: Any, kwargs: Any, shape: tuple[int, ...]) -> Layout:
    if tuple(one.size for one in dims) == shape:
        return dims, range(len(dims))
    return viewed(dims, shape), None


def _permute(dims: Dims, args: Any, kwargs: Any, shape: tuple[int, ...]) -> Layout:
    order = [one % len(dims) for one in args[0]]
    return [dims[one] for one in order], order


def _transpose(dims: Dims, args: Any, kwargs: Any, shape: tuple[int, ...]) -> Layout:
    order = list(range(len(dims)))
    a, b = (args[0] % len(dims), args[1] % len(dims)) if args else (0, len(dims) - 1)
    order[a], order[b] = order[b], order[a]
    return [dims[one] for one in order], order


def _unsqueeze(dims: Dims, args: Any, kwargs: Any, shape: tuple[int, ...]) -> Layout:
    at = args[0] % (len(dims) + 1)
    found: list[int | None] = list(range(len(dims)))
    return [*dims[:at], Dimension(1), *dims[at:]], [*found[:at], None, *found[at:]]


def _squeeze(dims: Dims, args: Any, kwargs: Any, shape: tuple[int, ...]) -> Layout:
    given = args[0] if args else range(len(dims))
    at = {one % len(dims) for one in ([given] if isinstance(given, int) else given)}
    kept = [one for one in range(len(dims)) if one not in at or dims[one].size != 1]
    return [dims[one] for one in kept], kept


def _expand(dims: Dims, args: Any, kwargs: Any, shape: tuple[int, ...]) -> Layout:
    more = len(shape) - len(dims)
    found = [Dimension(n) for n in shape[:more]]
    places: list[int | None] = [None] * more
    for place, (one, size) in enumerate(zip(dims, shape[more:], strict=True)):
        found.append(one if one.size == size else Dimension(size))
        places.append(place if one.size == size else None)
    return found, places


def _slice(dims: Dims, args: Any, kwargs: Any, shape: tuple[int, ...]) -> Layout:
    at = (args[0] if args else kwargs.get("dim", 0)) % len(dims)
    size = dims[at].size
    start, end, step = (args[1] if len(args) > 1 else 0), (args[2] if len(args) > 2 else size), 1
    step = args[3] if len(args) > 3 else kwargs.get("step", 1)
    start, end = (min(max(n + size if n < 0 else n, 0), size) for n in (start or 0, size if end is None else end))
    if step != 1:
        raise Clash("a slice with steps")
    return [*dims[:at], sliced(dims[at], start, end), *dims[at + 1 :]], range(len(dims))


def _repeat(dims: Dims, args: Any, kwargs: Any, shape: tuple[int, ...]) -> Layout:
    many = list(args[0])
    more = len(many) - len(dims)
    found = [Dimension(n) for n in many[:more]]
    for one, count in zip(dims, many[more:], strict=True):
        found.append(one if count == 1 else product_of([Dimension(count), one]))
    return found, None


# name of the operator -> (dims, its other arguments, keywords, shape of the result) -> layout
LAYOUTS: Mapping[str, Callable[..., Layout]] = {
    **dict.fromkeys(("detach", "alias", "clone", "contiguous", "lift_fresh", "_to_copy", "copy"), _same),
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "_reshape_alias"), _view),
    **dict.fromkeys(("transpose", "t", "numpy_T"), _transpose),
    "permute": _permute,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "expand": _expand,
    "slice": _slice,
    "repeat": _repeat,
}
