"""Random beacon: draw random numbers that no rank can predict or choose, the same on every rank (commit and reveal).

Each rank begins with a secret x_0 and sends x_N to all others, where x_{k+1} = hash(x_k). In draw k it reveals x_{N-k},
which the others verify against the value before; the number is a hash over all revealed values. One rank that keeps its
secret is enough. After N draws every rank begins with a new secret.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

_LENGTH = 1024  # draws of one secret
_BYTES, _WORD = 18, 6  # of a secret, and as much of it as is exact in a float64

GatherBytes = Callable[[tuple[float, ...]], Tensor]  # the row of every rank, (ranks, len(row)); all ranks call it


@dataclass(slots=True)
class RandomBeacon:
    """The random beacon of one rank: its hash chain, and the last value that every rank revealed."""

    gather: GatherBytes
    _chain: list[bytes] = field(default_factory=list)
    _told: list[bytes] = field(default_factory=list)  # by every rank, last

    def draw(self) -> tuple[int, list[int]]:
        """Return 64 random bits, and the ranks whose revealed value does not match their commitment.

        All ranks must call it.
        """
        if not self._chain:
            self._begin()
        said = self._all_tell(self._chain.pop())
        false = [rank for rank, word in enumerate(said) if _hash(word) != self._told[rank]]
        self._told = said
        return int.from_bytes(_hash(b"".join(said))[:8], "big"), false

    def _begin(self) -> None:
        self._chain = [secrets.token_bytes(_BYTES)]
        for _ in range(_LENGTH):
            self._chain.append(_hash(self._chain[-1]))
        self._told = self._all_tell(self._chain.pop())

    def _all_tell(self, word: bytes) -> list[bytes]:
        row = tuple(float(int.from_bytes(word[i : i + _WORD], "big")) for i in range(0, _BYTES, _WORD))
        return [_bytes(r) for r in self.gather(row).tolist()]


def _bytes(row: Sequence[float]) -> bytes:
    whole = (int(x) if 0 <= x < 2 ** (8 * _WORD) else 0 for x in row)
    return b"".join(x.to_bytes(_WORD, "big") for x in whole)


def _hash(word: bytes) -> bytes:
    return hashlib.blake2b(word, digest_size=_BYTES).digest()
