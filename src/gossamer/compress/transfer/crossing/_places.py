"""Places of a fixed number of entries per row, in as few bytes as they need."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Places:
    """`count` places in each of `rows` rows of `width` entries; as tensors (rows, count) int64, ascending."""

    rows: int
    width: int
    count: int

    @property
    def is_all(self) -> bool:
        """Every entry: there is nothing to say."""
        return self.count == self.width

    @property
    def dtype(self) -> torch.dtype:
        """The narrowest type that holds a place."""
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

    def to_bytes(self, places: Tensor) -> Tensor:
        """(nbytes,) uint8: a list of places, or one bit per entry."""
        if self._listed <= self._marked:
            return places.to(self.dtype).view(-1).view(torch.uint8)
        marks = torch.zeros(8 * self._marked, dtype=torch.uint8, device=places.device)
        marks[: self.rows * self.width].view(self.rows, self.width).scatter_(-1, places, 1)
        return (marks.view(-1, 8) << _shifts(places.device)).sum(-1, dtype=torch.uint8)

    def from_bytes(self, message: Tensor) -> Tensor:
        """(rows, count) int64."""
        if self._listed <= self._marked:
            return message.clone().view(self.dtype).view(self.rows, self.count).long()
        marks = (message.unsqueeze(-1) >> _shifts(message.device)).bitwise_and_(1).view(-1)
        found = marks[: self.rows * self.width].nonzero().view(self.rows, self.count)
        return found.remainder_(self.width)

    def scattered(self, values: Tensor, places: Tensor) -> Tensor:
        """(rows, width): `values` at `places`, zero elsewhere."""
        return values.new_zeros((self.rows, self.width)).scatter_(-1, places, values)


def _shifts(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)
