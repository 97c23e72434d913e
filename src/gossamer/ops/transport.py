"""The optimal transport between two sets of equal weights (earth mover's distance), exact.

    min_w sum_ij w_ij c_ij,    w >= 0,    sum_j w_ij = 1 / m,    sum_i w_ij = 1 / n
Symbols: c (m, n) costs; w (m, n) the flow. Weights are counted in units of 1 / lcm(m, n), so that flows are whole
numbers; each shortest path (Dijkstra with potentials) moves as much as it can. Exact up to float64 sums of costs;
of several optima it is always the same one.
R. K. Ahuja, T. L. Magnanti, J. B. Orlin, Network Flows, 1993, section 9.7, successive shortest paths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np


def optimal_flow(costs: Sequence[Sequence[float]]) -> np.ndarray:
    """Return the flow (m, n), in float64, whose sum is 1. Costs that are no finite numbers: 1 / (m n) everywhere."""
    cost = np.asarray(costs, dtype=np.float64)
    m, n = cost.shape
    if not np.isfinite(cost).all():  # a run that diverges: the loss is to say so
        return np.full((m, n), 1 / (m * n))
    units = math.lcm(m, n)
    flow = np.zeros((m, n), dtype=np.int64)
    supply, demand = np.full(m, units // m), np.full(n, units // n)
    potential = np.concatenate([cost.min(1), np.zeros(n)]) * -1.0
    while supply.any():
        distance, before = _paths(cost + potential[:m, None] - potential[None, m:], flow, supply)
        ends = np.where(demand > 0, distance[m:], np.inf)
        node = m + int(ends.argmin())
        potential += np.minimum(distance, distance[node])
        path = [node]
        while before[path[-1]] >= 0:
            path.append(int(before[path[-1]]))
        steps = [(a, b) for b, a in pairwise(path)]
        back = [flow[b, a - m] for a, b in steps if a >= m]
        moved = min(supply[path[-1]], demand[node - m], *back)
        for a, b in steps:
            if a < m:
                flow[a, b - m] += moved
            else:
                flow[b, a - m] -= moved
        supply[path[-1]] -= moved
        demand[node - m] -= moved
    return flow / units


def _paths(reduced: np.ndarray, flow: np.ndarray, supply: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distance of each node (m + n) from a source with supply, and the node before it; -1: a source."""
    m, n = reduced.shape
    forward = np.maximum(reduced, 0.0)  # below 0 by rounding alone
    distance = np.concatenate([np.where(supply > 0, 0.0, np.inf), np.full(n, np.inf)])
    before, is_open = np.full(m + n, -1), np.ones(m + n, dtype=bool)
    for _ in range(m + n):
        at = int(np.where(is_open, distance, np.inf).argmin())
        if not is_open[at] or not np.isfinite(distance[at]):
            break
        is_open[at] = False
        if at < m:
            targets, found = slice(m, m + n), distance[at] + forward[at]
        else:  # back along a flow, whose reduced cost is 0
            targets, found = slice(0, m), np.where(flow[:, at - m] > 0, distance[at], np.inf)
        better = is_open[targets] & (found < distance[targets])
        distance[targets][better] = found[better]
        before[targets][better] = at
    return distance, before
