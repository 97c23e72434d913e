"""What islands tell each other beside the steps: when it is heard, and that all hear the same."""

from __future__ import annotations

import pytest

from pool import Pool


@pytest.mark.parametrize("asked", range(1, 8))
def test_a_request_is_heard_by_all_after_the_same_step_two_or_three_later(pool: Pool, asked: int) -> None:
    found = pool.run("sync.apart_jobs:words", 3, steps=20, asked=[2, asked])
    assert found[0] == found[1] == found[2]
    done, step, ask, *_ = found[0][-1]
    assert ask == 1 and step == done - 2
    assert 2 <= done - asked < 4


def test_nothing_is_lost_at_the_end(pool: Pool) -> None:
    found = pool.run("sync.apart_jobs:words", 2, steps=9, asked=[-1, 0], start=2)
    assert [(done, step) for done, step, *_ in found[0]] == [(6, 4), (8, 6), (9, 8), (9, 9)]
    assert [sum(one[4][island] for one in found[0]) for island in range(2)] == [14.0, 14.0]
    assert [sum(one[3][island] for one in found[0]) for island in range(2)] == [0.0, 14.0]


def test_one_island_needs_no_word(pool: Pool) -> None:
    assert pool.run("sync.apart_jobs:alone", 1) == [True]
