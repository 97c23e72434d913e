"""Graphs of gossip: who averages with whom in a round, and with what weights. All ranks know the whole round without a
word: it is arithmetic on their places, their weights and a key they share.

W is the mixing matrix, x_i <- sum_j W_ij x_j. Every row sums to 1 and w_i W_ij = w_j W_ji, so that the mean weighted
with w stays where it is; where all weights are equal, W is doubly stochastic.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from gossamer.spec.registry import Registry


class Topology(ABC):
    """A frozen dataclass: its fields are its whole configuration."""

    @property
    def stays(self) -> int:
        """At most so many neighbours has everyone, the same in every round; 0: they change, or are everybody."""
        return 0

    @abstractmethod
    def near(self, place: int, ranks: int, key: tuple[int, int]) -> tuple[int, ...]:
        """The places that `place` of 0..ranks-1 averages with in the round of `key`, ascending, without itself."""

    @abstractmethod
    def row(self, place: int, weights: Sequence[float], key: tuple[int, int]) -> Mapping[int, float]:
        """W of `place`: by place, itself among them, ascending."""

    @abstractmethod
    def copies(self, place: int, ranks: int) -> tuple[float, ...]:
        """How often it sends its message to every place, in the mean over rounds that it takes part in."""


def metropolis(place: int, near: Sequence[int], weights: Sequence[float], degree: int) -> dict[int, float]:
    """The row w_i W_ij = min(w_i, w_j) / (1 + degree), the rest on itself: Metropolis-Hastings with the weights w."""
    mine = weights[place]
    row = {j: min(mine, weights[j]) / mine / (1 + degree) if mine > 0 else 0.0 for j in near}
    return dict(sorted({place: 1.0 - sum(row.values()), **row}.items()))


REGISTRY: Registry[Topology] = Registry(__name__, Topology)
names = REGISTRY.names
build = REGISTRY.build
