"""The slice of some rows of a parameter."""

from __future__ import annotations

from torch import Tensor

from gossamer.sharding import RowRange
from gossamer.store.slices import REPLICATED, Slice


def row_slice(name: str, whole: Tensor, rows: RowRange, tensor: Tensor, replica: int = REPLICATED) -> Slice:
    """Return the slice `tensor`: some rows of a tensor with as many rows as the parameter `whole`, or one number."""
    if not tensor.dim():
        return Slice.whole(name, (), replica)
    shape = (whole.shape[0], *tensor.shape[1:])
    return Slice(name, shape, (rows.start, *(0 for _ in shape[1:])), tuple(tensor.shape), replica)
