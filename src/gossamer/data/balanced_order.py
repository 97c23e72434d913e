"""Topic-aware, balanced batches for retrievers: queries of one topic, and pairs of all degrees of difficulty.

A batch takes its queries from one cluster, so that passages of other queries in it are hard negatives. For every query
a pair is drawn uniformly over bins of equal width of its teacher margins, so that the many easy pairs do not dominate.
All draws are functions of (seed, batch, place) alone: the same on any number of ranks, and a run resumes without state.
S. Hofstaetter et al., Efficiently Teaching an Effective Dense Retriever with Balanced Topic Aware Sampling, SIGIR 2021,
https://arxiv.org/abs/2104.06967, sections 3.1 and 3.2. Unlike the paper: clusters are drawn by their number of queries,
and with replacement.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gossamer.spec.errors import bad_input

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class BalancedOrder:
    """An order of pairs: global index -> row of the data, `together` rows per pair (3: query and both passages).

    query    (P,) the query of every pair; queries are numbered from 0
    margin   (P,) the teacher's margin of every pair
    cluster  (Q,) the cluster of every query
    size     pairs of a batch, of all ranks together: train.batch / together
    bins     of the margin; 1: pairs of a query are drawn uniformly
    """

    seed: int
    query: Ints
    margin: Floats
    cluster: Ints
    size: int
    bins: int = 10
    together: int = 3

    def __post_init__(self) -> None:
        if min(self.size, self.bins, self.together) < 1 or not len(self.query):
            got = f"{self.size} pairs, {self.bins} bins, {self.together} rows per pair, {len(self.query)} pairs in all"
            raise bad_input(wanted="1 or more of each", got=got, do="give more")
        if len(self.query) != len(self.margin) or int(self.query.max()) >= len(self.cluster):
            got = f"{len(self.margin)} margins for {len(self.query)} pairs of {len(self.cluster)} queries"
            raise bad_input(
                wanted="a margin of every pair and a cluster of every query", got=got, do="give all of them"
            )
        by_query = np.argsort(self.query, kind="stable")
        starts = np.searchsorted(self.query[by_query], np.arange(len(self.cluster) + 1))
        asked = np.flatnonzero(np.diff(starts))  # queries with a pair
        order = asked[np.argsort(self.cluster[asked], kind="stable")]
        object.__setattr__(self, "_pairs", (by_query, starts))
        object.__setattr__(self, "_queries", (order, self.cluster[order]))

    def __call__(self, indices: int | Iterable[int] | Ints) -> Ints:
        """Return the rows of global indices, in their shape; int64."""
        given = indices if isinstance(indices, (int, np.ndarray)) else list(indices)
        index = np.asarray(given, np.int64)
        flat, place = np.divmod(index.reshape(-1), self.together)
        batch, slot = np.divmod(flat, self.size)
        chosen = {int(one): self.batch(int(one)) for one in np.unique(batch)}
        pairs = np.array([chosen[int(b)][int(s)] for b, s in zip(batch, slot, strict=True)], np.int64)
        return (pairs * self.together + place).reshape(index.shape)

    def batch(self, number: int) -> Ints:
        """Return the pairs of one batch, (size,)."""
        draws = np.random.default_rng([self.seed % 2**63, number])
        queries, clusters = self._queries  # type: ignore[attr-defined]
        cluster = clusters[draws.integers(len(clusters))]  # by the number of its queries
        inside = queries[np.searchsorted(clusters, cluster) : np.searchsorted(clusters, cluster, "right")]
        rounds = -(-self.size // len(inside))  # a small cluster gives its queries again
        some = np.concatenate([draws.permutation(inside) for _ in range(rounds)])[: self.size]
        return np.array([self._pair(int(one), draws) for one in some], np.int64)

    def _pair(self, query: int, draws: np.random.Generator) -> int:
        by_query, starts = self._pairs  # type: ignore[attr-defined]
        pairs = by_query[starts[query] : starts[query + 1]]
        margin = self.margin[pairs]
        low, high = float(margin.min()), float(margin.max())
        width = (high - low) / self.bins
        bins = np.minimum(((margin - low) / width).astype(np.int64), self.bins - 1) if width > 0 else 0 * pairs
        filled = np.unique(bins)
        return int(draws.choice(pairs[bins == filled[draws.integers(len(filled))]]))


def clusters_of(points: NDArray[np.float32], count: int, *, seed: int = 0, rounds: int = 25) -> Ints:
    """Return the cluster of every point (n, D) by k-means on unit vectors, (n,); the same for one seed."""
    if not 1 <= count <= len(points):
        raise bad_input(wanted=f"1 to {len(points)} clusters", got=str(count), do="give as many", key="clusters")
    unit = points / np.maximum(np.linalg.norm(points, axis=1, keepdims=True), 1e-12)
    draws = np.random.default_rng(seed)
    centres = unit[draws.choice(len(unit), count, replace=False)]
    found = np.zeros(len(unit), np.int64)
    for _ in range(rounds):
        before, found = found, np.argmax(unit @ centres.T, axis=1)
        if np.array_equal(before, found):
            break
        for one in range(count):
            mine = unit[found == one]
            centre = mine.mean(0) if len(mine) else unit[draws.integers(len(unit))]  # a dead centre begins again
            centres[one] = centre / max(float(np.linalg.norm(centre)), 1e-12)
    return found
