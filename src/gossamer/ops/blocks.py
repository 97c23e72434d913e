"""Iteration over rows of numbers in chunks that fit the cache, of whole blocks that share a scale."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 1 << 19  # numbers worked on at a time: they stay in the cache between passes, and calls stay rare


@dataclass(frozen=True, slots=True)
class Span:
    """A slice of a tensor of rows: some rows, and of each the numbers [start, stop), in blocks of `width` numbers.

    They are whole blocks, or the short block at the end.
    """

    rows: slice
    start: int
    stop: int
    width: int
    block: int

    def numbers(self, t: Tensor) -> Tensor:
        """Return the span's part of t (rows, numel), as (rows, blocks, width)."""
        return t[self.rows, self.start : self.stop].view(self._rows, -1, self.width)

    def blocks(self, t: Tensor) -> Tensor:
        """Return the span's part of t (rows, ceil(numel / block)), one element per block, as (rows, blocks)."""
        return t[self.rows, self.start // self.block : -(-self.stop // self.block)]

    def packed(self, t: Tensor, bits: int) -> Tensor:
        """Return the span's bytes of t (rows, bytes), which holds `bits` for each number."""
        return t[self.rows, self.start * bits // 8 : -(-self.stop * bits // 8)]

    def scratch(self, t: Tensor) -> Tensor:
        """Return the first elements of t (chunk,), one for each number of the span, as (rows, blocks, width)."""
        return t[: self._rows * (self.stop - self.start)].view(self._rows, -1, self.width)

    @property
    def _rows(self) -> int:
        return int(self.rows.stop - self.rows.start)


def spans(of: Tensor, block: int) -> Iterator[Span]:
    """Yield spans that cover (rows, numel) numbers, with at most CHUNK numbers each (but at least a block)."""
    rows, numel = of.shape
    whole = numel // block * block
    for start, stop, width in ((0, whole, block), (whole, numel, numel - whole)):
        if start == stop:
            continue
        step = min(stop - start, max(width, CHUNK // width * width))
        several = max(1, CHUNK // step)
        for first in range(0, rows, several):
            for here in range(start, stop, step):
                yield Span(slice(first, min(rows, first + several)), here, min(stop, here + step), width, block)


def as_rows(t: Tensor) -> Tensor:
    """Return (..., numel) as (rows, numel), without a copy where it is contiguous."""
    return t.unsqueeze(0) if t.dim() == 1 else t.flatten(0, -2)


def scratch(x: Tensor, block: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a buffer for the numbers of one span of x; reuse it, as fresh memory costs more than the arithmetic."""
    return torch.empty(min(x.numel(), max(CHUNK, block)), dtype=dtype, device=x.device)


def part(message: Tensor, start: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return a view of the `count` numbers of `dtype` that begin `start` bytes into every message (..., nbytes)."""
    if not message.numel():  # nothing has no alignment
        return torch.empty((*message.shape[:-1], count), dtype=dtype, device=message.device)
    return message[..., start : start + count * dtype.itemsize].view(dtype)


def empty_message(x: Tensor, nbytes: int) -> Tensor:
    """Return an empty message per row of x (..., numel): (..., nbytes) uint8, its last four bytes zero as padding."""
    out = torch.empty((*x.shape[:-1], nbytes), dtype=torch.uint8, device=x.device)
    out[..., -4:] = 0
    return out
