"""Who is odd, of several that should say the same."""

from __future__ import annotations

from gossamer.spec.odd_one_out import outvoted, parted


def test_who_is_outvoted() -> None:
    assert outvoted("aaa") == []
    assert outvoted("aba") == [1]
    assert outvoted("ab") is None
    assert outvoted("abcaa") == [1, 2]


def test_the_odd_ones_are_named_whoever_they_are_and_all_groups_where_nobody_is() -> None:
    assert parted("baaa") == "rank 0 differs from the other 3"
    assert parted("abaca") == "ranks 1, 3 differ from the other 3"
    assert parted("ab") == "rank 0 and rank 1 differ"
    assert parted("abab") == "ranks 0, 2 and ranks 1, 3 differ, and none of them is a majority"
    assert parted("aabc") == "ranks 0, 1, rank 2 and rank 3 differ, and none of them is a majority"
