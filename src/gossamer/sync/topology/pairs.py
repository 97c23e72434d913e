"""Pairs: in every round a new random matching; both ranks of a pair load their weighted mean.

Equations (pair i, j):
    x_i, x_j <- (w_i x_i + w_j x_j) / (w_i + w_j)
Symbols: w weights. The matching is a random permutation from the shared key, cut in twos; of an odd number one sits
out.
Contraction: |x - mean|^2 falls by lambda_2(E W^2) = lambda_2(E W) = (n - 2) / (2 (n - 1)) per round, in expectation and
for even n (W is a projection).
Wire:    one message to one rank. `traffic` spreads it evenly over all other ranks: the mean per link over
rounds, an upper bound where n is odd.
Paper:   Boyd et al., Randomized Gossip Algorithms, IEEE Trans. IT 2006, with all pairs of a matching at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from gossamer.comm.random_key import key_at
from gossamer.sync.topology import Topology


@dataclass(frozen=True, slots=True)
class Pairs(Topology):
    """A random matching of the ranks, drawn anew in every round from the shared key, without a message."""

    def near(self, place: int, ranks: int, key: tuple[int, int]) -> tuple[int, ...]:
        seed = key_at((*key, "pairs"), 0).shared
        drawn = torch.randperm(ranks, generator=torch.Generator().manual_seed(seed)).tolist()
        other = drawn.index(place) ^ 1
        return (drawn[other],) if other < ranks else ()

    def row(self, place: int, weights: Sequence[float], key: tuple[int, int]) -> Mapping[int, float]:
        both = sorted((place, *self.near(place, len(weights), key)))
        total = sum(weights[i] for i in both)
        return {i: weights[i] / total for i in both} if total > 0 else {place: 1.0}

    def copies(self, place: int, ranks: int) -> tuple[float, ...]:
        return tuple(1 / (ranks - 1) if i != place else 0.0 for i in range(ranks))
