"""Whether numbers were normalised over the rows that a rank has, outside of the graph."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.own_loop import layout as lay
from gossamer.own_loop.layout import Layout, Together
from gossamer.own_loop.places import Place, Way

_LOOKED_THROUGH = 1 << 22  # numbers of one tensor


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


def refuse_standardised(name: str, given: Tensor | None, place: Place) -> None:
    """What a layer is given was normalised over this rank's rows: as a whole, or each of its features."""
    if given is None or place.way is not Way.ROWS or given.dim() < 2 or given.numel() > _LOOKED_THROUGH:
        return
    if is_normalised(given, place.layout) and has_spread_one(given, place.layout):
        raise Together(f"{name} of numbers that were normalised over rows")


def has_spread_one(target: Tensor, layout: Layout) -> bool:
    (dim, *_) = lay.where(layout)
    wide = target.detach().double()
    spreads = [wide.std(correction=c) for c in (0, 1)] + [wide.std(dim, correction=c) for c in (0, 1)]
    return any(bool(((one - 1).abs() < 1e-3).all()) for one in spreads)
