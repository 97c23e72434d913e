"""Random bits for stochastic rounding: a pool of words drawn once, and a fresh affine map of it for every use."""

from __future__ import annotations

import torch
from torch import Tensor


class Noise:
    """A generator of uniform random 32-bit words, any two of them independent.

    The pool is r, and `words` returns a r + b (mod 2^32) with an odd a and any b drawn each time. Every word stays
    uniform and any two stay independent, which is all that the mean and the variance of a sum depend on. Drawing every
    word afresh would take longer than the rest of an encoding.
    """

    def __init__(self, most: int, generator: torch.Generator, device: torch.device) -> None:
        self._generator = generator
        self._pool = self._drawn(most, device)
        self._moved: Tensor | None = None

    def words(self, count: int) -> Tensor:
        """Return (count,) int32, at most `most` words; valid until the next call, and free to be changed."""
        pair = self._drawn(2, self._pool.device)
        return torch.add(pair[1], self._pool[:count], alpha=int(pair[0]) | 1, out=self._room()[:count])

    @property
    def pool(self) -> Tensor:
        """Return r, (at least `most`,) int32."""
        return self._pool

    def pairs(self, count: int) -> Tensor:
        """Return (count, 2) int32: a, made odd by its lowest bit, and b of the next `count` calls of `words`."""
        return torch.cat([self._drawn(2, self._pool.device) for _ in range(count)]).view(count, 2)

    def _room(self) -> Tensor:
        if self._moved is None:
            self._moved = torch.empty_like(self._pool)
        return self._moved

    def _drawn(self, count: int, device: torch.device) -> Tensor:
        words = torch.empty(-(-count // 2), dtype=torch.int64, device=device)
        return words.random_(-(2**63), None, generator=self._generator).view(torch.int32)
