"""The cheapest set of units within a number of bytes, beside all sets."""

from __future__ import annotations

import random
from itertools import chain, combinations

import pytest

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


@pytest.mark.parametrize("alive", [1, 2, 5])
def test_it_is_the_best_of_all_sets(alive: int) -> None:
    draw = random.Random(0)
    for _ in range(400):
        given = units(draw)
        able = [i for i, one in enumerate(given) if one.again is not None]
        sets = [*chain.from_iterable(combinations(able, n) for n in range(len(able) + 1))]
        peaks = {one: by_hand(given, one, alive) for one in sets}
        assert all(peak(given, one, alive=alive) == most for one, most in peaks.items())
        assert least_budget(given, alive=alive) == min(peaks.values())
        for budget in (draw.randint(0, 200 * alive), min(peaks.values()), min(peaks.values()) - 1):
            within = {one: sum(given[i].seconds for i in one) for one in sets if peaks[one] <= budget}
            found = cheapest_set(given, budget, alive=alive)
            assert (found is None) == (not within)
            if found is not None:
                assert within[found] == min(within.values()), "a set within the budget, and none is cheaper"


def by_hand(given: list[UnitChoice], chosen: tuple[int, ...], alive: int) -> int:
    """The most bytes that are there while any unit runs, of all micro-batches alive."""
    ways = [one.again if i in chosen and one.again is not None else one.plain for i, one in enumerate(given)]
    kept = [way.kept for way in ways]
    return (alive - 1) * sum(kept) + max(sum(kept[:i]) + max(w.most, w.kept) for i, w in enumerate(ways))


def test_many_units_of_few_kinds_are_quick() -> None:
    kinds = units(random.Random(3))
    given = [kinds[i % len(kinds)] for i in range(200)]
    for alive in (1, 4):
        least = least_budget(given, alive=alive)
        chosen = cheapest_set(given, least, alive=alive)
        assert chosen is not None and peak(given, chosen, alive=alive) == least


def test_micro_batches_that_wait_make_kept_bytes_dearer_than_those_of_a_moment() -> None:
    """One unit keeps much, the other needs much while it runs: which is recomputed depends on who else is alive."""
    keeps = UnitChoice(seconds=2, plain=UnitBytes(kept=30, most=30), again=UnitBytes(kept=0, most=30))
    wide = UnitChoice(seconds=1, plain=UnitBytes(kept=5, most=60), again=UnitBytes(kept=4, most=20))
    assert peak([keeps, wide], ()) == 90 and cheapest_set([keeps, wide], 60) == (1,)
    assert peak([keeps, wide], (), alive=3) == 160 and cheapest_set([keeps, wide], 80, alive=3) == (0,)
