"""Detection of tensors that were normalized over a rank's rows outside of the autograd graph."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from gossamer.loss_reader import row_dims as lay
from gossamer.loss_reader.row_dims import RowDims, RowsMixed
from gossamer.loss_reader.row_flow import RowPath, RowPlace

_LOOKED_THROUGH = 1 << 22  # numbers of one tensor


def is_normalized(other: Tensor, layout: RowDims, rows: int) -> bool:
    """Return whether a tensor has a mean of 0 or 1 over rows, as normalizing by its own statistics gives it.

    `layout`: where the tensor's rows are; `rows`: of this rank's batch.
    """
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
    each = _by_row(wide, other.dim() - back, layout[dim], rows)
    if each.shape[1] > 1 and _is_centered(each, 1):
        return False  # every row by itself, by its own statistics
    return _is_centered(wide, None) or _is_centered(wide, other.dim() - back)


def _by_row(wide: Tensor, at: int, dim: lay.Dim, rows: int) -> Tensor:
    """Return the tensor as (rows, elements of each), where dimension `at` has rows."""
    if dim[0][1].startswith(lay.PART) and rows and dim[0][0] % rows == 0:
        dim = ((rows, lay.ROWS), (dim[0][0] // rows, ""))
    place = next(index for index, (_, label) in enumerate(dim) if label not in ("", lay.SPREAD))
    outer = prod(size for size, _ in dim[:place])
    return wide.movedim(at, 0).reshape(outer, dim[place][0], -1).movedim(1, 0).flatten(1)


def _is_centered(wide: Tensor, dim: int | None) -> bool:
    mean = wide.mean() if dim is None else wide.mean(dim)
    size = wide.abs().mean() if dim is None else wide.abs().mean(dim)
    is_near = torch.minimum(mean.abs(), (mean - 1).abs()) < 1e-6 * size
    return bool(is_near.all())


def refuse_standardised(name: str, given: Tensor | None, place: RowPlace, rows: int) -> None:
    """Raise RowsMixed if a layer's input was normalized over this rank's rows, in total or per feature."""
    if given is None or place.way is not RowPath.ROWS or given.dim() < 2 or given.numel() > _LOOKED_THROUGH:
        return
    if is_normalized(given, place.layout, rows) and has_spread_one(given, place.layout):
        raise RowsMixed(f"{name} of numbers that were normalized over rows")


def has_spread_one(target: Tensor, layout: RowDims) -> bool:
    """Return whether a tensor has a standard deviation of 1, in total or along its row dimension."""
    (dim, *_) = lay.where(layout)
    wide = target.detach().double()
    spreads = [wide.std(correction=c) for c in (0, 1)] + [wide.std(dim, correction=c) for c in (0, 1)]
    return any(bool(((one - 1).abs() < 1e-3).all()) for one in spreads)
