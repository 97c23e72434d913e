"""Indexing operations: selection of rows, and scattering of values back to the rows' places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.loss_reader import row_dims as lay
from gossamer.loss_reader.graph_nodes import kept, made, saved, several_kept, signed
from gossamer.loss_reader.row_dims import RowDims, RowsLost, RowsMixed
from gossamer.loss_reader.row_flow import (
    LOST,
    GraphStep,
    RowFlow,
    RowPath,
    RowPlace,
    all_kept,
    known_of,
    need_layouts,
    with_dim,
)


def _index(flow: RowFlow, node: Any, name: str, inputs: list[RowPlace | None]) -> RowPlace:
    one = known_of(inputs)[0]
    if one.way is not RowPath.ROWS:
        return one
    if name == "IndexSelect":
        given: list[Tensor | None] = [None for _ in range(signed(node._saved_dim) % len(one.layout))]
        given.append(kept(node, "index"))
    else:
        given = [one for index in several_kept(node, "indices") for one in _numbers(index)]
    used = [at for at, index in enumerate(given) if index is not None]
    if not used:
        return all_kept(flow, node, name, one.layout)
    indices = [index for index in given if index is not None]
    shape = broadcast([tuple(index.shape) for index in indices])
    before = used[0] if used[-1] - used[0] + 1 == len(used) else 0
    untouched = [dim for at, dim in enumerate(one.layout) if at not in used]
    picked: RowDims = lay.plain(shape)
    at_rows = [at for at in used if lay.labels(one.layout[at])]
    if at_rows and shape:
        index = given[at_rows[0]]
        assert index is not None
        picked = _picked(flow, one.layout[at_rows[0]], index, tuple(shape))
    elif at_rows:
        source, output = node.next_functions[0]
        index = given[at_rows[0]]
        assert index is not None
        rows = lay.size_of(one.layout[at_rows[0]])
        return flow.row((source, output), int(index) % rows, rows)
    return RowPlace(RowPath.ROWS, (*untouched[:before], *picked, *untouched[before:]))


def _numbers(index: Tensor | None) -> list[Tensor | None]:
    """Return a mask as index tensors, one per dimension; other indices as they are."""
    if index is None or index.dtype not in (torch.bool, torch.uint8):
        return [index]
    return list(index.nonzero(as_tuple=True))


def broadcast(several: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the sizes to which tensors of these sizes broadcast."""
    ndim = max(map(len, several))
    return tuple(max(one[-back] for one in several if back <= len(one)) for back in range(ndim, 0, -1))


def _picked(flow: RowFlow, dim: lay.Dim, index: Tensor, shape: tuple[int, ...]) -> RowDims:
    """Return the dimensions that an index makes from a dimension with rows."""
    whole = lay.size_of(dim)
    if index.numel() == whole and _is_count(index):  # all of them, one after the other
        own = [at for at, size in enumerate(index.shape) if size == whole]
        back = index.dim() - own[0] if own else 1
        return tuple(dim if len(shape) - at == back else ((size, ""),) for at, size in enumerate(shape))
    index = index.detach().cpu() % max(1, whole)
    numbers = flow.numbers.of(dim)
    if numbers is None:
        return lay.with_rows(shape, _varying(index, len(shape)), f"{lay.PART}/{flow.numbers.code(index)}")
    rows = numbers[index]
    for at in range(rows.dim()):
        if (one := _of_one_column(rows, at)) is not None and (rows.shape[at] > 1 or rows.numel() == 1):
            place = at + len(shape) - rows.dim()
            made_dim = flow.numbers.dim(one)
            spread = shape[place] // max(1, lay.size_of(made_dim))
            return with_dim(lay.plain(shape), place, (*made_dim, (spread, "")) if spread > 1 else made_dim)
    return lay.with_rows(shape, _varying(index, len(shape)), f"{lay.PICKED}/{flow.numbers.code(rows)}")


def _varying(index: Tensor, ndim: int) -> int:
    """Return the outermost dimension of size over 1 of an index, counted in the result."""
    own = next((at for at, size in enumerate(index.shape) if size > 1), 0)
    return max(0, own + ndim - index.dim())


def _is_count(index: Tensor) -> bool:
    flat = index.flatten()
    return bool((flat == torch.arange(flat.numel(), device=flat.device)).all())


def _put_back(flow: RowFlow, node: Any, name: str, inputs: list[RowPlace | None]) -> RowPlace:
    """Return the place of values of selected rows added at the rows' own places, or put into other dimensions."""
    need_layouts(name, inputs, is_linear=True)
    into = inputs[0]
    source = next((one for one in inputs[1:] if one is not None and one.way is RowPath.ROWS), None)
    if name.startswith(("IndexPut", "UnsafeIndexPut")):
        given = [one for index in several_kept(node, "indices") for one in _numbers(index)]
        dims = [at for at, index in enumerate(given) if index is not None]
        index = given[dims[0]] if dims else None
        dim = dims[0] if dims else 0
    else:
        dim, index = signed(node._saved_dim) % max(1, len(made(node))), kept(node, "index")
    if into is not None and into.way is RowPath.ROWS and not lay.labels(into.layout[dim]):
        return into
    sizes = made(node)
    if source is None:
        return into if into is not None and into.way is RowPath.ROWS else LOST
    if not any(lay.labels(one) for one in source.layout[dim : dim + 1]):
        return RowPlace(RowPath.ROWS, lay.joined([with_dim(source.layout, dim, ((1, ""),))], sizes, name))
    (label, *_) = lay.labels(source.layout[dim])
    whole = sizes[dim]
    if label.startswith(lay.PART):
        is_all = whole == flow.origin.rows
        return RowPlace(RowPath.ROWS, lay.with_rows(sizes, dim, lay.ROWS if is_all else f"{lay.PART}{whole}"))
    if index is not None and index.dim() > 1:
        index = _of_one_column(index, dim)
    old = into.layout[dim] if into is not None and into.way is RowPath.ROWS else ()
    found_dim = _where_put(flow, source.layout[dim], index, whole, old, name)
    return RowPlace(RowPath.ROWS, with_dim(lay.plain(sizes), dim, found_dim))


def _where_put(flow: RowFlow, dim: lay.Dim, index: Tensor | None, whole: int, into: lay.Dim, name: str) -> lay.Dim:
    """Return the dimension of size `whole` that rows of `dim` were put into. Raises RowsMixed if two rows share a
    place.
    """
    numbers = flow.numbers.of(dim)
    if numbers is None or index is None or index.dim() != 1 or index.numel() != numbers.numel():
        raise RowsLost(name)
    index = index.detach().cpu().long() % max(1, whole)
    low = torch.full((whole,), -1).scatter_reduce(0, index, numbers, "amin", include_self=False)
    high = torch.full((whole,), -1).scatter_reduce(0, index, numbers, "amax", include_self=False)
    if not torch.equal(low, high):
        raise RowsMixed(name)
    is_filled = low >= 0
    there = flow.numbers.of(into) if into else None
    if there is not None and not torch.equal(there[is_filled], low[is_filled]):
        raise RowsMixed(name)
    if into:
        return into
    if bool(is_filled.all()):
        return flow.numbers.dim(low)
    for one in flow.numbers.folds(whole):
        there = flow.numbers.of(one)
        if there is not None and torch.equal(there[is_filled], low[is_filled]):
            return one
    raise RowsLost(name)


def _of_one_column(index: Tensor, dim: int) -> Tensor | None:
    """Return one column of an index that is constant over its other dimensions; None if it is not."""
    columns = index.movedim(dim, 0).reshape(index.shape[dim], -1)
    if not index.numel():
        return None
    return columns[:, 0] if bool((columns == columns[:, :1]).all()) else None


def _gather(flow: RowFlow, node: Any, name: str, inputs: list[RowPlace | None]) -> RowPlace:
    one = known_of(inputs)[0]
    if one.way is not RowPath.ROWS:
        return one
    dim = signed(node._saved_dim) % len(one.layout)
    sizes = made(node)
    if lay.labels(one.layout[dim]) and not lay.is_loose(one.layout[dim]):
        index = kept(node, "index")
        column = _of_one_column(index, dim) if index is not None and flow.origin.rows > 1 else None
        if column is None:
            raise RowsMixed(name)
        return RowPlace(RowPath.ROWS, with_dim(one.layout, dim, *_picked(flow, one.layout[dim], column, (sizes[dim],))))
    if any(lay.size_of(one.layout[at]) != sizes[at] for at in lay.where(one.layout)):
        raise RowsLost(name)
    return RowPlace(
        RowPath.ROWS,
        tuple(old if lay.labels(old) else ((size, ""),) for old, size in zip(one.layout, sizes, strict=True)),
    )


def _masked(flow: RowFlow, node: Any, name: str, inputs: list[RowPlace | None]) -> RowPlace:
    one = known_of(inputs)[0]
    if one.way is not RowPath.ROWS:
        return one
    mask, sizes = kept(node, "mask"), lay.sizes_of(one.layout)
    (at, *_) = lay.where(one.layout)
    numbers = flow.numbers.of(one.layout[at])
    if mask is None or numbers is None or broadcast([sizes, tuple(mask.shape)]) != sizes:
        return RowPlace(RowPath.ROWS, lay.with_rows(made(node), 0, f"{lay.PART}ed"))
    return RowPlace(RowPath.ROWS, (flow.numbers.dim(numbers[mask.expand(sizes).nonzero(as_tuple=True)[at].cpu()]),))


def _packed(flow: RowFlow, node: Any, name: str, inputs: list[RowPlace | None]) -> RowPlace:
    """Return the place of a packed sequence: all rows of one time step, then those of the next."""
    one = known_of(inputs)[0]
    if one.way is not RowPath.ROWS:
        return one
    sizes, each = made(node), kept(node, "result1")
    rows = one.layout[0 if saved(node, "batch_first") else 1]
    if lay.labels(rows) and each is not None and bool((each == lay.size_of(rows)).all()):  # all of one length
        return RowPlace(RowPath.ROWS, with_dim(lay.plain(sizes), 0, ((each.numel(), ""), *rows)))
    return RowPlace(RowPath.ROWS, lay.with_rows(sizes, 0, f"{lay.PART}ed"))


STEPS: dict[str, GraphStep] = {
    **dict.fromkeys(("Index", "IndexSelect", "UnsafeIndex"), _index),
    **dict.fromkeys(("IndexAdd", "IndexPut", "IndexPutImpl", "UnsafeIndexPut", "IndexReduce", "IndexCopy"), _put_back),
    **dict.fromkeys(("ScatterAdd", "ScatterReduce", "Scatter"), _put_back),
    "Gather": _gather,
    "MaskedSelect": _masked,
    "PackPaddedSequence": _packed,
}
