"""Sequences of several sources in one run, each with its part of all tokens: which comes when is arithmetic."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gossamer.data.ordering import Order, SampleOrder
from gossamer.data.packing import Indices, Sequences, Split
from gossamer.data.stream import Int64, Stream

_BITS = 32
_ONE = 1 << _BITS


@dataclass(frozen=True)
class MixedSequences(Sequences):
    """The sequences of one side of several sources, numbered one source after the other.

    `weights`: each source's part of all tokens without padding, in any scale; `names`: of the sources.
    """

    names: tuple[str, ...]
    splits: tuple[Split, ...]
    weights: tuple[float, ...]
    sequence: int
    fingerprint: str

    def __len__(self) -> int:
        return int(self._borders[-1])

    def batch(self, indices: Indices) -> dict[str, Tensor]:
        index, of = self._located(indices)
        parts = {n: split.batch(index[of == n]) for n, split in enumerate(self.splits) if (of == n).any()}
        keys = dict.fromkeys(key for split in self.splits for key in split.batch([]))
        found = {key: torch.ones((index.size, self.sequence), dtype=torch.int64) for key in keys}  # a mask is 1
        for n, part in parts.items():
            for key, values in part.items():
                found[key][torch.from_numpy(of == n)] = values
        return found

    def bytes_of(self, indices: Indices) -> int:
        index, of = self._located(indices)
        return sum(split.bytes_of(index[of == n]) for n, split in enumerate(self.splits))

    def labels_of(self, indices: Indices) -> Int64:
        index, of = self._located(indices)
        found = np.zeros(index.size, np.int64)
        for n, split in enumerate(self.splits):
            found[of == n] = split.labels_of(index[of == n])
        return found

    def tokens_of(self, index: int) -> int:
        inner, of = self._located([index])
        return self.splits[int(of[0])].tokens_of(int(inner[0]))

    def is_marked(self, index: int) -> bool:
        inner, of = self._located([index])
        return self.splits[int(of[0])].is_marked(int(inner[0]))

    def streams(self) -> tuple[Stream, ...]:
        return tuple(split.stream for split in self.splits)

    def order(self, seed: int) -> Order:
        orders = tuple(
            SampleOrder(seed ^ int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big"), len(split))
            for name, split in zip(self.names, self.splits, strict=True)
        )
        return MixedOrder(self._nested, orders, self._borders)

    def first(self, count: int) -> Int64:
        """Return sequences of every source in proportion, and all of a source that has too few."""
        turns = MixedOrder(self._nested, (), self._borders)
        taken = np.bincount([turns.turn(n)[0] for n in range(count)], minlength=len(self.splits))
        return np.concatenate(
            [
                np.arange(border, border + min(int(most), len(split)))
                for border, most, split in zip(self._borders, taken, self.splits, strict=False)
            ]
        )

    @cached_property
    def _borders(self) -> Int64:
        """(sources + 1,): sequences before each source."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum([len(split) for split in self.splits])])

    @cached_property
    def _nested(self) -> tuple[int, ...]:
        """Each source's part of all sequences, its weight divided by its mean number of tokens, as `nested_shares`."""
        per_sequence = [Fraction(split.layout.mean_tokens()) or Fraction(1) for split in self.splits]
        parts = [Fraction(weight) / mean for weight, mean in zip(self.weights, per_sequence, strict=True)]
        return nested_shares([part / sum(parts) for part in parts])

    def _located(self, indices: Indices) -> tuple[Int64, Int64]:
        """Return the index within its source, and the number of the source, of each sequence."""
        index = np.asarray(indices if isinstance(indices, np.ndarray) else list(indices), np.int64)
        assert index.ndim == 1 and ((index >= 0) & (index < len(self))).all(), f"no such sequences: {index}"
        of = np.searchsorted(self._borders, index, side="right") - 1
        return index - self._borders[of], of


@dataclass(frozen=True)
class MixedOrder:
    """The order of samples of a mixture: global index -> sequence index.

    The first source has the turns at which floor(i p + 1/2) grows, p its part of all sequences; of the turns that are
    left, the second has its part in the same way, and so on. So at any index each of k sources has had its part to
    within k / 2 sequences. Its own turns are numbered by what they are counted by, and ordered by its SampleOrder:
    O(k) time per index and no state.
    """

    shares: tuple[int, ...]  # of what the sources before have left, times 2**32; without the last source
    orders: tuple[SampleOrder, ...]
    borders: Int64  # (sources + 1,): sequences before each source

    def __call__(self, indices: int | Iterable[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sequence indices of global indices, in their shape (an int gives shape ()); int64."""
        given = indices if isinstance(indices, (int, np.ndarray)) else list(indices)
        index = np.asarray(given, np.int64)
        turns = [self.turn(int(one)) for one in index.reshape(-1)]
        of = np.array([source for source, _ in turns], np.int64)
        counted = np.array([count for _, count in turns], np.int64)
        found = np.zeros(of.size, np.int64)
        for n, order in enumerate(self.orders):
            found[of == n] = self.borders[n] + order(counted[of == n])
        return found.reshape(index.shape)

    def turn(self, index: int) -> tuple[int, int]:
        """Return the source of a global index, and how many turns that source has had before."""
        for source, share in enumerate(self.shares):
            before, after = (((index + n) * share + _ONE // 2) >> _BITS for n in (0, 1))
            if after > before:
                return source, before
            index -= before
        return len(self.shares), index


def nested_shares(parts: Sequence[Fraction]) -> tuple[int, ...]:
    """Return each part of 1 as a part of what those before it leave, times 2**32; without the last."""
    left, found = Fraction(1), []
    for part in parts[:-1]:
        found.append(min(round(part / left * _ONE), _ONE - 1))
        left -= part
    return tuple(found)
