"""Ring: everyone averages with the one before and the one after.

Equations:
    x_i <- sum_{j in {i-1, i, i+1}} W_ij x_j,   w_i W_ij = min(w_i, w_j) / 3 for j != i
Symbols: w weights; with equal ones W_ij = 1/3.
Contraction: |x - mean| falls by lambda_2(W) = 1/3 + 2/3 cos(2 pi / n) per round at least, for n >= 4 equal ones.
Wire:    one message to two ranks.   Good when: neighbors are near, or messages are compressed: a rank has the same
neighbors in every round.
Not for: many ranks: 1 - lambda_2 falls with n^2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gossamer.sync.topology import Topology, metropolis


@dataclass(frozen=True, slots=True)
class Ring(Topology):
    """A ring of the ranks in their order: every rank averages with the one before and the one after."""

    @property
    def fixed_degree(self) -> int:
        return 2

    def near(self, place: int, ranks: int, key: tuple[int, int]) -> tuple[int, ...]:
        return tuple(sorted({(place - 1) % ranks, (place + 1) % ranks} - {place}))

    def row(self, place: int, weights: Sequence[float], key: tuple[int, int]) -> Mapping[int, float]:
        near = self.near(place, len(weights), key)
        return metropolis(place, near, weights, len(near))

    def copies(self, place: int, ranks: int) -> tuple[float, ...]:
        near = self.near(place, ranks, (0, 0))
        return tuple(float(i in near) for i in range(ranks))
