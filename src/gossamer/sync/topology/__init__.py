"""Gossip topologies: the neighbors each rank averages with in a round, and the weights.

All ranks compute the whole round without a message, from ranks, weights and a shared random key. W is the mixing
matrix, x_i <- sum_j W_ij x_j. Every row sums to 1 and w_i W_ij = w_j W_ji, so that the mean weighted with w does not
change; where all weights are equal, W is doubly stochastic.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from gossamer.spec.registry import Registry


class Topology(ABC):
    """A gossip topology: a frozen dataclass whose fields are its whole configuration."""

    @property
    def fixed_degree(self) -> int:
        """Return the largest number of neighbors of a rank, if they never change; 0 if they do, or are all ranks."""
        return 0

    @abstractmethod
    def near(self, place: int, ranks: int, key: tuple[int, int]) -> tuple[int, ...]:
        """Return the neighbors of `place` among 0..ranks-1 in the round of `key`, ascending, without itself."""

    @abstractmethod
    def row(self, place: int, weights: Sequence[float], key: tuple[int, int]) -> Mapping[int, float]:
        """Return row `place` of W, by place, ascending and with itself."""

    @abstractmethod
    def copies(self, place: int, ranks: int) -> tuple[float, ...]:
        """Return how often `place` sends its message to every place, averaged over the rounds it takes part in."""


def metropolis(place: int, near: Sequence[int], weights: Sequence[float], degree: int) -> dict[int, float]:
    """Return row `place` of W by Metropolis-Hastings: w_i W_ij = min(w_i, w_j) / (1 + degree), the rest on itself."""
    mine = weights[place]
    row = {j: min(mine, weights[j]) / mine / (1 + degree) if mine > 0 else 0.0 for j in near}
    return dict(sorted({place: 1.0 - sum(row.values()), **row}.items()))


REGISTRY: Registry[Topology] = Registry(__name__, Topology)
names = REGISTRY.names
build = REGISTRY.build
