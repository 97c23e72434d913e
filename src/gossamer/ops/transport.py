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

Matrix = list[list[float]]


def optimal_flow(costs: Sequence[Sequence[float]]) -> Matrix:
    """Return the flow, m rows of n, whose sum is 1. Costs that are no finite numbers: 1 / (m n) everywhere."""
    m, n = len(costs), len(costs[0])
    if not all(math.isfinite(one) for row in costs for one in row):  # a run that diverges: the loss is to say so
        return [[1 / (m * n)] * n for _ in range(m)]
    units = math.lcm(m, n)
    flow = [[0] * n for _ in range(m)]
    supply, demand = [units // m] * m, [units // n] * n
    potential = [-min(row) for row in costs] + [0.0] * n
    while any(supply):
        reduced = [[max(costs[i][j] + potential[i] - potential[m + j], 0.0) for j in range(n)] for i in range(m)]
        distance, before = _paths(reduced, flow, supply)
        node = m + min((j for j in range(n) if demand[j]), key=lambda j: distance[m + j])
        potential = [one + min(far, distance[node]) for one, far in zip(potential, distance, strict=True)]
        path = [node]
        while before[path[-1]] >= 0:
            path.append(before[path[-1]])
        steps = [(a, b) for b, a in pairwise(path)]
        moved = min(supply[path[-1]], demand[node - m], *(flow[b][a - m] for a, b in steps if a >= m))
        for a, b in steps:
            if a < m:
                flow[a][b - m] += moved
            else:
                flow[b][a - m] -= moved
        supply[path[-1]] -= moved
        demand[node - m] -= moved
    return [[one / units for one in row] for row in flow]


def _paths(reduced: Matrix, flow: list[list[int]], supply: Sequence[int]) -> tuple[list[float], list[int]]:
    """Return the distance of each node (m + n) from a source with supply, and the node before it; -1: a source.

    A step goes forward at its reduced cost, or back along a flow, whose reduced cost is 0.
    """
    m, n = len(reduced), len(reduced[0])
    distance = [0.0 if one else math.inf for one in supply] + [math.inf] * n
    before, left = [-1] * (m + n), set(range(m + n))
    while left:
        at = min(left, key=lambda node: (distance[node], node))
        left.remove(at)
        if at < m:
            found = {m + j: distance[at] + cost for j, cost in enumerate(reduced[at])}
        else:
            found = {i: distance[at] for i in range(m) if flow[i][at - m]}
        for node, far in found.items():
            if node in left and far < distance[node]:
                distance[node], before[node] = far, at
    return distance, before
