"""Whose rows of a parameter are whose."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows [start, start + count) of a tensor's first dimension; a number is one row."""

    start: int
    count: int

    def of(self, tensor: Tensor) -> Tensor:
        """The view of them, with as many dimensions as the tensor has; a number is all there or an error."""
        return tensor if tensor.dim() == 0 else tensor[self.start : self.start + self.count]


def rows_of(name: str, shape: Sequence[int], ranks: int) -> tuple[Rows, ...]:
    """By rank. Where there are fewer rows than ranks, one rank has all of them: which one depends on the name, and so
    does who has one row more where they cannot be equal; over many parameters that evens out.
    """
    count = shape[0] if shape else 1
    first = zlib.crc32(name.encode()) % ranks
    if count < ranks:
        return tuple(Rows(0, count if rank == first else 0) for rank in range(ranks))
    each, more = divmod(count, ranks)
    sizes = [each + ((rank - first) % ranks < more) for rank in range(ranks)]
    return tuple(Rows(sum(sizes[:rank]), size) for rank, size in enumerate(sizes))
