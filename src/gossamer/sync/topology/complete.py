"""Complete: everyone averages with everyone, so all are equal after one round: the baseline.

Equations:
    x_i <- sum_j w_j x_j
Symbols: w weights.   Contraction: lambda_2 = 0.
Wire:    one message to all n - 1 others: more than an all-reduce, for the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gossamer.sync.topology import Topology


@dataclass(frozen=True, slots=True)
class Complete(Topology):
    """The complete graph: every rank averages with all others, which makes gossip equal to local SGD."""

    def near(self, place: int, ranks: int, key: tuple[int, int]) -> tuple[int, ...]:
        return tuple(i for i in range(ranks) if i != place)

    def row(self, place: int, weights: Sequence[float], key: tuple[int, int]) -> Mapping[int, float]:
        total = sum(weights)
        return {i: w / total for i, w in enumerate(weights)} if total > 0 else {place: 1.0}

    def copies(self, place: int, ranks: int) -> tuple[float, ...]:
        return tuple(float(i != place) for i in range(ranks))
