"""Iteration over rows of numbers in chunks that fit the cache, of whole blocks that share a scale."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 1 << 19  # numbers worked on at a time: they stay in the cache between passes, and calls stay rare


@dataclass(frozen=True, slots=True)
class BlockSpans:
    """The numbers [start, stop) of `rows` rows, in blocks of `width`, cut into spans.

    A span is `step` numbers of each of `several` rows, or fewer at the end. The blocks are whole ones, or the short
    block at the end of every row. The methods return one view for each span, the spans of the first rows first, and all
    of them at once: between large passes every call from Python costs microseconds.
    """

    rows: int
    start: int
    stop: int
    width: int
    block: int

    @property
    def step(self) -> int:
        """Return the count of numbers that a span has of each of its rows."""
        return min(self.stop - self.start, max(self.width, CHUNK // self.width * self.width))

    @property
    def several(self) -> int:
        """Return the count of rows of a span."""
        return max(1, CHUNK // self.step)

    def numbers(self, t: Tensor) -> list[Tensor]:
        """Return the spans of t (rows, numel), as (several, blocks, width)."""
        return self._cut(t[:, self.start : self.stop].view(self.rows, -1, self.width), self.step // self.width)

    def blocks(self, t: Tensor) -> list[Tensor]:
        """Return the spans of t (rows, ceil(numel / block), ...), one element per block, as (several, blocks, ...)."""
        return self._cut(t[:, self.start // self.block : -(-self.stop // self.block)], self.step // self.width)

    def packed(self, t: Tensor, bits: int) -> list[Tensor]:
        """Return the bytes of the spans of t (rows, bytes), which holds `bits` for each number."""
        return self._cut(t[:, self.start * bits // 8 : -(-self.stop * bits // 8)], -(-self.step * bits // 8))

    def scratch(self, t: Tensor) -> list[Tensor]:
        """Return the first elements of t (chunk,) for every span, one for each number, as (several, blocks, width)."""
        of_rows = [min(self.several, self.rows - first) for first in range(0, self.rows, self.several)]
        of_numbers = [min(self.step, self.stop - first) for first in range(self.start, self.stop, self.step)]
        sizes = [(rows, numel) for rows in of_rows for numel in of_numbers]
        views = {(rows, n): t[: rows * n].view(rows, -1, self.width) for rows, n in set(sizes)}
        return [views[size] for size in sizes]

    def _cut(self, t: Tensor, size: int) -> list[Tensor]:
        return [span for rows in torch.split(t, self.several) for span in torch.split(rows, size, 1)]


def spans(of: Tensor, block: int) -> Iterator[BlockSpans]:
    """Yield the spans of whole blocks, then of short ones, that cover (rows, numel) numbers, as far as there are any.

    A span has at most CHUNK numbers, but at least a block.
    """
    rows, numel = of.shape
    whole = numel // block * block
    for start, stop, width in ((0, whole, block), (whole, numel, numel - whole)):
        if rows and start != stop:
            yield BlockSpans(rows, start, stop, width, block)


def as_rows(t: Tensor) -> Tensor:
    """Return (..., numel) as (rows, numel), without a copy where it is contiguous."""
    return t.unsqueeze(0) if t.dim() == 1 else t.flatten(0, -2)


def dense_rows(t: Tensor) -> Tensor:
    """Return t as (rows, numel) with neighbors side by side; a copy where they are not."""
    rows = as_rows(t)
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def scratch(x: Tensor, block: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a buffer for the numbers of one span of x; reuse it, as fresh memory costs more than the arithmetic."""
    return torch.empty(span_size(x, block), dtype=dtype, device=x.device)


def span_size(x: Tensor, block: int) -> int:
    """Return the most numbers that a span of x has."""
    return min(x.numel(), max(CHUNK, block))


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
