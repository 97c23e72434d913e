"""The order of samples: a permutation per epoch, computed for any index alone, so resuming needs no state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gossamer.spec.errors import bad_input

_ROUNDS = 6

UInt64 = NDArray[np.uint64]


class Order(Protocol):
    """An order of samples: global index -> sequence index, from arithmetic alone."""

    def __call__(self, indices: int | Iterable[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sequence indices of global indices, in their shape (an int gives shape ()); int64."""


@dataclass(frozen=True)
class SampleOrder:
    """The order of samples: global index -> sequence index.

    index // size is the epoch, and each epoch visits every sequence once.

    The permutation is a balanced Feistel network of 6 rounds over the next power of four, keyed by (seed, epoch). It is
    applied until the result is below `size` (4 times at most on average). O(1) time and memory per index. Raises
    BadInput when `size` is below 1.
    """

    seed: int
    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise bad_input(
                wanted="at least 1 sequence", got=f"{self.size} sequences", do="give more text", key="data.source"
            )

    def __call__(self, indices: int | Iterable[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sequence indices of global indices, in their shape (an int gives shape ()); int64."""
        given = indices if isinstance(indices, (int, np.ndarray)) else list(indices)
        index = np.asarray(given, np.int64)
        epoch, place = np.divmod(index.reshape(-1), self.size)
        keys = _mix(_mix(np.full(place.shape, self.seed % 2**64, np.uint64)) ^ epoch.astype(np.uint64))
        found = self._shuffle(place.astype(np.uint64), keys)
        while (outside := found >= self.size).any():
            found[outside] = self._shuffle(found[outside], keys[outside])
        return found.astype(np.int64).reshape(index.shape)

    def _shuffle(self, place: UInt64, keys: UInt64) -> UInt64:
        """One pass of the network: a permutation of [0, 4**half_bits)."""
        half_bits = np.uint64(max(1, ((self.size - 1).bit_length() + 1) // 2))
        mask = (np.uint64(1) << half_bits) - np.uint64(1)
        left, right = place >> half_bits, place & mask
        for number in range(_ROUNDS):
            left, right = right, left ^ (_mix(keys + np.uint64(number) ^ (right << np.uint64(8))) & mask)
        return np.asarray((left << half_bits) | right, np.uint64)


def order(seed: int, size: int) -> SampleOrder:
    """Return the order of `size` sequences under `seed`."""
    return SampleOrder(seed, size)


def _mix(value: UInt64) -> UInt64:
    """splitmix64's finalizer: every output bit depends on every input bit; arithmetic modulo 2**64."""
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(value ^ (value >> np.uint64(31)), np.uint64)
