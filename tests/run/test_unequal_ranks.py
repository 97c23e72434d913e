"""Which rank the others wait for: batch fractions that shorten the step, and no more words than there is news."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gossamer.autotune.unequal_ranks import UnequalRanks
from gossamer.data.share import share_rows
from gossamer.spec.plan import MeshSizes, Plan

ALIKE, FIRST, SECOND = [1.0, 1.0], [1.0, 0.2], [0.2, 1.0]


def plan(rows: Sequence[int], stages: int = 1) -> Plan:
    return Plan(
        mesh=MeshSizes(replica=len(rows), pipe=stages),
        batch_fractions=tuple(one / sum(rows) for one in rows),
        rows=tuple(rows),
        microbatches=(1,) * len(rows),
    )


def said(seconds: Sequence[float], rows: Sequence[int]) -> str:
    """What is said before training of ranks that compute for so long in a step, each on its rows."""
    return UnequalRanks().at_start(seconds, plan(rows))


def test_a_rank_five_times_slower_is_named_with_fractions_that_help() -> None:
    line = said([0.2, 1.0], [4, 4])
    assert line.startswith("rank 1 computes 1 s in a step, rank 0 only 200 ms, and waits for the other")
    assert line.endswith("with plan.batch_fractions=[7, 1] a step would compute 350 ms"), "7 rows of 50 ms, 1 of 250"


def test_fractions_that_were_given_count() -> None:
    """Six rows in 0.6 s, two in 0.6: nobody waits. A rank that got too many is named, though it is the fastest."""
    assert said([0.6, 0.6], [6, 2]) == ""
    line = said([0.6, 0.1], [7, 1])
    assert line.startswith("rank 0 computes 600 ms") and line.endswith("=[4, 4] a step would compute 400 ms")


@pytest.mark.parametrize("seconds", [[1.0, 1.0], [1.4, 1.0], [1.0], [0.0, 0.0]])
def test_ranks_that_are_alike_say_nothing(seconds: list[float]) -> None:
    assert said(seconds, [4] * len(seconds)) == ""


def test_where_no_fraction_helps_none_is_named() -> None:
    """Of two sequences each rank computes one, however slow; of many ranks the list would be long."""
    assert said([0.1, 1.0], [1, 1]) == "rank 1 computes 1 s in a step, rank 0 only 100 ms, and waits for the other"
    assert "batch_fractions" not in said([0.2] * 31 + [1.0], [4] * 32)


def test_stages_are_not_compared() -> None:
    """They hold different parts of the model."""
    assert UnequalRanks().at_start([1.0, 0.1], plan([8], stages=2)) == ""


def test_fractions_as_told_give_the_rows_that_were_meant() -> None:
    assert share_rows(8, [7, 1]) == (7, 1) and share_rows(31, [20, 8, 3]) == (20, 8, 3)


def test_what_is_known_is_not_told_again() -> None:
    """Two ranks that are equally slow, one about at the limit, and a profile that is made anew in mid-run."""
    known, four = UnequalRanks(), plan([1, 1, 1, 1])
    assert known.at_start([1.0, 1.0, 3.0, 2.9], four).startswith("rank 2 computes 3 s")
    looks = [[1.0, 1.0, 2.9, 3.0]] * 3 + [[1.0, 1.0, 1.45, 1.4]] * 3 + [[1.0, 1.0, 1.6, 1.5]] * 3
    assert not any(known.later(seconds, four) for seconds in looks)
    assert known.at_start([1.0, 1.0, 2.8, 3.0], four) == ""
    assert known.at_start([3.0, 1.0, 1.0, 1.0], four).startswith("rank 0 computes 3 s")


@pytest.mark.parametrize(
    ("start", "looks", "news"),
    [
        (ALIKE, [SECOND, SECOND, SECOND], [False, True, False]),
        (ALIKE, [SECOND, ALIKE, SECOND, FIRST], [False] * 4),
        (SECOND, [SECOND, SECOND], [False, False]),
        (SECOND, [FIRST, FIRST], [False, True]),
        (SECOND, [ALIKE, ALIKE, SECOND, SECOND], [False, False, False, True]),
        (SECOND, [ALIKE, SECOND, SECOND], [False, False, False]),
    ],
    ids=["becomes slow", "now and then", "stays slow", "another one", "slow again", "a fast moment"],
)
def test_in_mid_run_what_two_looks_say_is_told_once(
    start: list[float], looks: list[list[float]], news: list[bool]
) -> None:
    known = UnequalRanks()
    known.at_start(start, plan([4, 4]))
    assert [bool(known.later(seconds, plan([4, 4]))) for seconds in looks] == news
