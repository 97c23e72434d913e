"""Which units swap and which are recomputed, beside all sets."""

from __future__ import annotations

import random
from itertools import chain, combinations

import pytest

from gossamer.saver._swap_choice import SwapCosts, SwapUnit, fastest_set, seconds_of


def units(draw: random.Random) -> list[SwapUnit]:
    return [
        SwapUnit(size_bytes=draw.randint(0, 40), seconds=draw.uniform(0, 5), can_recompute=draw.random() < 0.8)
        for _ in range(draw.randint(1, 9))
    ]


def test_it_is_the_best_of_all_sets() -> None:
    draw, ways = random.Random(0), set[str]()
    for _ in range(300):
        given = units(draw)
        costs = SwapCosts(forward_s=draw.uniform(1, 20), backward_s=draw.uniform(1, 40), rate=draw.uniform(1, 30))
        must = [i for i, one in enumerate(given) if not one.can_recompute]
        able = [i for i, one in enumerate(given) if one.can_recompute]
        sets = [(*must, *more) for more in chain.from_iterable(combinations(able, n) for n in range(len(able) + 1))]
        best = min(sum(seconds_of(given, one, costs)) for one in sets)
        found = fastest_set(given, costs)
        assert set(must) <= set(found)
        assert sum(seconds_of(given, found, costs)) == pytest.approx(best, rel=1e-12)
        ways.add("all" if len(found) == len(given) else "none" if not found else "some")
    assert ways == {"all", "none", "some"}


def test_the_seconds_are_those_of_the_equations() -> None:
    given = [SwapUnit(size_bytes=10, seconds=1.0), SwapUnit(size_bytes=30, seconds=2.0)]
    costs = SwapCosts(forward_s=3.0, backward_s=6.0, rate=5.0)
    assert seconds_of(given, (0, 1), costs) == (8.0, 8.0)  # the file is the slower one
    assert seconds_of(given, (0,), costs) == (3.0, 8.0)  # 6 and 2 of the second one, once more
    assert seconds_of(given, (), costs) == (3.0, 9.0)
    assert fastest_set(given, costs) == (0,)


def test_a_fast_file_takes_all_and_a_slow_one_nothing() -> None:
    given = [SwapUnit(size_bytes=10, seconds=1.0)] * 50
    assert len(fastest_set(given, SwapCosts(forward_s=50.0, backward_s=100.0, rate=float("inf")))) == 50
    assert fastest_set(given, SwapCosts(forward_s=50.0, backward_s=100.0, rate=1e-3)) == ()
