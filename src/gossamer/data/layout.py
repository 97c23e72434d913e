"""The layout of sequences in a token stream: which tokens each sequence holds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from gossamer.data.stream import Int64

_SOME = 4096  # sequences looked at together


class Packing(ABC):
    """The layout of sequences in a token stream."""

    count: int  # sequences
    sequence: int  # tokens in each, with padding
    pads: bool  # whether a sequence may hold fewer tokens than its length
    joins: bool  # whether a sequence may hold several documents

    @abstractmethod
    def positions(self, indices: Int64) -> tuple[Int64, NDArray[np.bool_]]:
        """Return the index in the stream, and whether there is a token; both (n, sequence). Any index where not."""

    def mean_tokens(self) -> float:
        """Return the mean number of tokens per sequence, without padding; 0 where there is no sequence."""
        total = sum(
            int(self.positions(np.arange(first, min(first + _SOME, self.count)))[1].sum())
            for first in range(0, self.count, _SOME)
        )
        return total / max(1, self.count)


class Windows(Packing):
    """The layout of sequences that are windows of the stream."""

    @abstractmethod
    def windows(self, indices: Int64) -> tuple[Int64, Int64]:
        """Return (first token, number of tokens) of each sequence; both (n,)."""

    def positions(self, indices: Int64) -> tuple[Int64, NDArray[np.bool_]]:
        first, size = self.windows(indices)
        column = np.arange(self.sequence)
        real = column < size[:, None]
        return first[:, None] + np.where(real, column, 0), real


@dataclass(frozen=True)
class Packed(Windows):
    """The packing of full windows over the complete token stream, across documents."""

    tokens: int
    sequence: int
    pads: bool = False
    joins: bool = True

    @property
    def count(self) -> int:  # type: ignore[override]
        return max(0, self.tokens - 1) // (self.sequence - 1)

    def windows(self, indices: Int64) -> tuple[Int64, Int64]:
        return indices * (self.sequence - 1), np.full_like(indices, self.sequence)

    def mean_tokens(self) -> float:
        return float(self.sequence)


@dataclass(frozen=True)
class PerDocument(Windows):
    """The packing of windows within one document each; its last window may be shorter (two tokens at least)."""

    starts: Int64  # (documents,)
    ends: Int64  # (documents,)
    sequence: int
    pads: bool = True
    joins: bool = False

    @property
    def count(self) -> int:  # type: ignore[override]
        return int(self._before[-1])

    @cached_property
    def _before(self) -> Int64:
        """(documents + 1,): sequences before each document."""
        chunks = -(-(self.ends - self.starts - 1) // (self.sequence - 1))
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(chunks)])

    def windows(self, indices: Int64) -> tuple[Int64, Int64]:
        document = np.searchsorted(self._before, indices, side="right") - 1
        first = self.starts[document] + (indices - self._before[document]) * (self.sequence - 1)
        return first, np.minimum(self.sequence, self.ends[document] - first)
