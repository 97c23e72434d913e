"""The slices that cover a whole tensor, or some rows of one."""

from __future__ import annotations

from torch import Tensor

from gossamer.sharding import RowRange
from gossamer.store.slices import REPLICATED, NamedSlice, Slice


def whole(name: str, tensor: Tensor, replica: int) -> Slice:
    """Return the slice that covers all of a tensor."""
    shape = tuple(tensor.shape)
    return Slice(name, shape, (0,) * len(shape), shape, replica)


def rows_of(name: str, whole: Tensor, rows: RowRange, tensor: Tensor, replica: int = REPLICATED) -> NamedSlice:
    """Return a slice of some rows of a tensor with the shape of a parameter."""
    shape = tuple(whole.shape)
    start = (rows.start, *(0 for _ in shape[1:])) if shape else ()
    return Slice(name, shape, start, tuple(tensor.shape), replica), tensor
