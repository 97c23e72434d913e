"""Rows of a matrix as blocks of 64 elements."""

from __future__ import annotations

from torch import Tensor, nn

BLOCK = 64


def count(columns: int) -> int:
    """Return the number of blocks in a row of `columns` elements; the last may be shorter."""
    return -(-columns // BLOCK)


def in_blocks(weight: Tensor) -> Tensor:
    """Return (rows, columns) as (rows, blocks, 64) in float32. A shorter last block repeats its row's last element,

    which changes neither the smallest nor the largest of the block.
    """
    rows, columns = weight.shape
    missing = count(columns) * BLOCK - columns
    wide = weight.detach().float()
    if missing:
        wide = nn.functional.pad(wide, (0, missing), mode="replicate")
    return wide.reshape(rows, -1, BLOCK)
