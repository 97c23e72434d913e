"""The slice of some rows of a parameter."""

from __future__ import annotations

from torch import Tensor

from gossamer.sharding import RowRange
from gossamer.store.slices import REPLICATED, Slice


def row_slice(name: str, whole: Tensor, rows: RowRange, tensor: Tensor, replica: int = REPLICATED) -> Slice:
    """Return the slice `tensor`, some rows of a tensor with the shape of the parameter `whole`."""
    shape = tuple(whole.shape)
    start = (rows.start, *(0 for _ in shape[1:])) if shape else ()
    return Slice(name, shape, start, tuple(tensor.shape), replica)
