"""The cheapest set of units within a number of bytes, beside all sets."""

from __future__ import annotations

import random
from itertools import chain, combinations

from gossamer.saver._cheapest_set import UnitBytes, UnitChoice, cheapest_set, least_budget, peak


def units(draw: random.Random) -> list[UnitChoice]:
    found = []
    for _ in range(draw.randint(1, 8)):
        kept = draw.randint(0, 40)
        plain = UnitBytes(kept=kept, most=kept + draw.randint(0, 30))
        less = draw.randint(0, kept)
        again = UnitBytes(kept=less, most=max(plain.most, less) + draw.randint(0, 10))
        found.append(UnitChoice(seconds=draw.randint(1, 9), plain=plain, again=again if draw.random() < 0.8 else None))
    return found


def test_it_is_the_best_of_all_sets() -> None:
    draw = random.Random(0)
    for _ in range(400):
        given = units(draw)
        able = [i for i, one in enumerate(given) if one.again is not None]
        sets = [*chain.from_iterable(combinations(able, n) for n in range(len(able) + 1))]
        peaks = {one: peak(given, one) for one in sets}
        assert least_budget(given) == min(peaks.values())
        for budget in (draw.randint(0, 200), min(peaks.values()), min(peaks.values()) - 1):
            within = {one: sum(given[i].seconds for i in one) for one in sets if peaks[one] <= budget}
            found = cheapest_set(given, budget)
            assert (found is None) == (not within)
            if found is not None:
                assert within[found] == min(within.values()), "a set within the budget, and none is cheaper"


def test_many_units_of_few_kinds_are_quick() -> None:
    kinds = units(random.Random(3))
    given = [kinds[i % len(kinds)] for i in range(200)]
    chosen = cheapest_set(given, least_budget(given))
    assert chosen is not None and peak(given, chosen) == least_budget(given)
