"""Indices of the k largest elements per row: find them, and encode them in few bytes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_GATHER = 0x0102040810204080  # times a word of eight bytes 0 or 1: the top byte holds them as bits, the first lowest


@dataclass(frozen=True, slots=True)
class TopKIndices:
    """The indices of `count` elements in each of `rows` rows of `width`; as tensors (rows, count) int64, ascending."""

    rows: int
    width: int
    count: int

    @property
    def is_all(self) -> bool:
        """Whether every element is selected, so that no index is sent."""
        return self.count == self.width

    @property
    def dtype(self) -> torch.dtype:
        """The narrowest dtype that holds an index."""
        return torch.int16 if self.width <= 1 << 15 else torch.int32

    @property
    def nbytes(self) -> int:
        return 0 if self.is_all else min(self._listed, self._marked)

    @property
    def _listed(self) -> int:
        return self.rows * self.count * self.dtype.itemsize

    @property
    def _marked(self) -> int:
        return -(-self.rows * self.width // 8)

    def largest(self, x: Tensor) -> Tensor:
        """Return the indices of the largest magnitudes of x (rows, width).

        Of equal magnitudes the first counts; NaN is largest.
        """
        kind = _BITS[x.dtype.itemsize]
        bits = x.contiguous().view(kind) & torch.iinfo(kind).max  # without the sign, ordered like magnitudes
        least = _least(bits, self.count)
        places = _found(bits >= least)
        if places.numel() != self.rows * self.count:  # several entries as large as the smallest that goes
            above, equal = bits > least, bits == least
            wanted = self.count - above.sum(-1, keepdim=True)
            places = _found(above | (equal & (equal.cumsum(-1) <= wanted)))
        return self._in_rows(places)

    def to_bytes(self, places: Tensor) -> Tensor:
        """Encode indices as (nbytes,) uint8: a list of indices, or one bit per element."""
        if self._listed <= self._marked:
            return places.to(self.dtype).view(-1).view(torch.uint8)
        marks = torch.zeros(8 * self._marked, dtype=torch.uint8, device=places.device)
        marks[: self.rows * self.width].view(self.rows, self.width).scatter_(-1, places, 1)
        return marks.view(torch.int64).mul_(_GATHER).bitwise_right_shift_(56).bitwise_and_(0xFF).to(torch.uint8)

    def from_bytes(self, message: Tensor) -> Tensor:
        """Decode indices to (rows, count) int64."""
        if self._listed <= self._marked:
            return message.clone().view(self.dtype).view(self.rows, self.count).long()
        marks = _spread(message.device)[message.int()].view(torch.bool)
        return self._in_rows(_found(marks[: self.rows * self.width]))

    def _in_rows(self, places: Tensor) -> Tensor:
        """Places among all entries as places in their rows."""
        starts = torch.arange(self.rows, device=places.device).mul_(self.width)
        return places.view(self.rows, self.count).sub_(starts.unsqueeze(-1))

    def scattered(self, values: Tensor, places: Tensor) -> Tensor:
        """Return (rows, width) with `values` at `places`, zero elsewhere."""
        return values.new_zeros((self.rows, self.width)).scatter_(-1, places, values)


def _least(bits: Tensor, count: int) -> Tensor:
    """Return the smallest of the `count` largest of every row, (rows, 1)."""
    if bits.device.type != "cpu":
        return bits.topk(count).values[:, -1:]
    at = bits.shape[-1] - count
    # Where the processor has the vectors for it, numpy selects up to 20 times faster than torch does.
    return torch.from_numpy(np.partition(bits.numpy(), at, axis=-1)[:, at : at + 1])


def _found(mask: Tensor) -> Tensor:
    """Return the indices of a mask, flat and ascending; numpy finds them up to 20 times faster than torch does."""
    flat = mask.view(-1)
    return flat.nonzero().view(-1) if mask.device.type != "cpu" else torch.from_numpy(np.flatnonzero(flat.numpy()))


@cache
def _spread(device: torch.device) -> Tensor:
    """Return (256,) int64: the bits of every byte as eight bytes 0 or 1."""
    byte = torch.arange(256).unsqueeze(-1)
    return (byte >> torch.arange(8) & 1).to(torch.uint8).view(torch.int64).flatten().to(device)
