"""Steps that pick rows, and steps that put back what was made of them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.own_loop import layout as lay
from gossamer.own_loop.layout import Layout, Together
from gossamer.own_loop.nodes import kept, made, several_kept, signed
from gossamer.own_loop.places import LOST, Flow, Place, Step, Way, all_kept, known_of, with_dim, without_layout


def _index(flow: Flow, node: Any, name: str, inputs: list[Place | None]) -> Place:
    one = known_of(inputs)[0]
    if one.way is not Way.ROWS:
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


def broadcast(several: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The sizes that all are spread to."""
    ndim = max(map(len, several))
    return tuple(max(one[-back] for one in several if back <= len(one)) for back in range(ndim, 0, -1))


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
    is_order = flat.numel() == whole and len(set(flat.tolist())) == whole
    return f"{lay.ORDERED if is_mask or is_order else lay.PICKED}/{found}"


def _put_back(flow: Flow, node: Any, name: str, inputs: list[Place | None]) -> Place:
    """What was made of picked rows, added in the rows' own places; or something put into other dimensions."""
    if (found := without_layout(name, inputs, is_linear=True)) is not None:
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
        return Place(Way.ROWS, lay.joined([with_dim(source.layout, dim, ((1, ""),))], sizes, name))
    (label, *_) = lay.labels(source.layout[dim])
    whole = sizes[dim]
    if label.startswith(lay.PART):
        return Place(
            Way.ROWS, lay.with_rows(sizes, dim, lay.ROWS if whole == flow.origin.rows else f"{lay.PART}{whole}")
        )
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


def _gather(flow: Flow, node: Any, name: str, inputs: list[Place | None]) -> Place:
    one = known_of(inputs)[0]
    if one.way is not Way.ROWS:
        return one
    dim = signed(node._saved_dim) % len(one.layout)
    sizes = made(node)
    if lay.labels(one.layout[dim]):
        raise Together(name)
    if any(lay.size_of(one.layout[at]) != sizes[at] for at in lay.where(one.layout)):
        raise Together(name)
    return Place(
        Way.ROWS, tuple(old if lay.labels(old) else ((size, ""),) for old, size in zip(one.layout, sizes, strict=True))
    )


def _masked(flow: Flow, node: Any, name: str, inputs: list[Place | None]) -> Place:
    one = known_of(inputs)[0]
    if one.way is not Way.ROWS:
        return one
    mask = kept(node, "mask")
    bits = 0 if mask is None else zlib.crc32(mask.detach().cpu().contiguous().numpy().tobytes())
    return Place(Way.ROWS, lay.with_rows(made(node), 0, f"{lay.ORDERED}/{bits}"))


def _packed(flow: Flow, node: Any, name: str, inputs: list[Place | None]) -> Place:
    """The steps of all rows, one after the other."""
    one = known_of(inputs)[0]
    return Place(Way.ROWS, lay.with_rows(made(node), 0, f"{lay.PART}ed")) if one.way is Way.ROWS else one


STEPS: dict[str, Step] = {
    **dict.fromkeys(("Index", "IndexSelect", "UnsafeIndex"), _index),
    **dict.fromkeys(("IndexAdd", "IndexPut", "IndexPutImpl", "UnsafeIndexPut", "IndexReduce", "IndexCopy"), _put_back),
    **dict.fromkeys(("ScatterAdd", "ScatterReduce", "Scatter"), _put_back),
    "Gather": _gather,
    "MaskedSelect": _masked,
    "PackPaddedSequence": _packed,
}
