"""Optimal flows against every vertex of small polytopes, which the best of all assignments of units is."""

from __future__ import annotations

import math
from itertools import permutations

import numpy as np
import pytest

from gossamer.ops.transport import optimal_flow


def cheapest(cost: np.ndarray) -> float:
    """Return the least cost, by trying all assignments of the lcm(m, n) units of both sides."""
    m, n = cost.shape
    units = math.lcm(m, n)
    each = [[float(cost[a * m // units, b * n // units]) for b in range(units)] for a in range(units)]
    return min(sum(each[a][b] for a, b in enumerate(order)) for order in permutations(range(units))) / units


@pytest.mark.parametrize(("m", "n"), [(1, 1), (1, 4), (3, 1), (2, 3), (3, 2), (4, 4), (2, 6), (3, 6), (5, 5)])
def test_the_flow_is_the_cheapest_with_its_marginals(m: int, n: int) -> None:
    draw = np.random.default_rng(m * 10 + n)
    for cost in (draw.normal(size=(m, n)), draw.integers(0, 3, (m, n)).astype(float)):  # of both signs; with ties
        flow = np.array(optimal_flow(cost.tolist()))
        assert (flow >= 0).all()
        np.testing.assert_allclose(flow.sum(1), 1 / m)
        np.testing.assert_allclose(flow.sum(0), 1 / n)
        assert (flow * cost).sum() == pytest.approx(cheapest(cost), abs=1e-12)


def test_a_larger_flow_has_prices_that_prove_it_optimal() -> None:
    """Residual graph without a negative cycle (Bellman-Ford): no flow is cheaper."""
    cost = np.random.default_rng(0).normal(size=(7, 12))
    flow, m, n = np.array(optimal_flow(cost.tolist())), 7, 12
    np.testing.assert_allclose(flow.sum(1), 1 / m)
    np.testing.assert_allclose(flow.sum(0), 1 / n)
    rows, columns = np.zeros(m), np.zeros(n)
    for _ in range(m + n):
        columns = np.minimum(columns, (rows[:, None] + cost).min(0))
        rows = np.minimum(rows, np.where(flow > 0, columns[None] - cost, np.inf).min(1))
    assert (rows[:, None] + cost - columns >= -1e-9).all()
    assert (np.where(flow > 0, columns[None] - cost - rows[:, None], 0) >= -1e-9).all()


def test_costs_that_are_no_numbers_have_a_flow() -> None:
    assert optimal_flow([[math.nan, 1.0], [2.0, 3.0]]) == [[0.25, 0.25], [0.25, 0.25]]
