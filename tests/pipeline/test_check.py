"""Legal schedules pass; every way of breaking one is found and pointed at."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gossamer.pipeline.passes import with_transfers
from gossamer.pipeline.schedule import Schedule
from gossamer.pipeline.validate import IllegalSchedule, check
from gossamer.spec.action import Action, Op
from pipeline.orders import gpipe, listed, one_f_one_b, parse, split_1f1b, vee

LEGAL = [gpipe(4, 8), one_f_one_b(4, 8), one_f_one_b(3, 1), split_1f1b(4, 5), vee(4), vee(1), gpipe(1, 1)]


@pytest.mark.parametrize("schedule", LEGAL, ids=lambda s: s.name)
def test_legal_with_and_without_transfers(schedule: Schedule) -> None:
    check(schedule)
    check(with_transfers(schedule))


ONE = "0F0 0B0 0F1 0B1 0RG"
BROKEN = [
    ("0B0 0F0 0F1 0B1 0RG", 0, "needs 0F0, which comes after"),
    ("0F0 0B0 0F1 0B1", 4, "0RG is missing"),
    ("0F0 0B0 0RG 0F1 0B1", 2, "needs 0B1, which comes after"),
    ("0F0 0B0 0F1 0RG", 4, "0B1 is missing"),
    ("0F0 0B0 0B1 0RG", 4, "0F1 is missing"),
    ("0F0 0F0 0B0 0F1 0B1 0RG", 1, "the same action is at place 0 too"),
    ("0F0 0B0 0B0 0F1 0B1 0RG", 2, "the same action is at place 1 too"),
    ("0F0 0B0 0F1 0B1 0RG 0RG", 5, "the same action is at place 4 too"),
    ("0F0 0B0 0F1 0B1 0F2 0RG", 4, "there are 2 micro-batches"),
    ("0F0 0B0 0F1 0B1 1F0 0RG", 4, "there are 1 stages"),
    ("0F0 0B0 0F1 0B1 0RG0", 4, "whole stage"),
    ("0F0 0B0 0F1 0I1 0RG", 5, "0W1 is missing"),
    ("0F0 0B0 0F1 0W1 0RG", 5, "0I1 is missing"),
    ("0F0 0B0 0F1 0W1 0I1 0RG", 3, "needs 0I1, which comes after"),
    ("0F0 0B0 0F1 0B1 0I1 0W1 0RG", 4, "whole backward too"),
    ("0F0 0B0 0R0 0F1 0B1 0RG", 1, "needs 0R0, which comes after"),
    ("0F0 0B0 0SF0 0F1 0B1 0RG", 2, "no tensor goes to another rank"),
    ("0F0 0OF0 0B0 0F1 0B1 0RG", 2, "offloaded and not reloaded"),
    ("0F0 0B0 0F1 0B1 0RL1 0RG", 3, "needs 0RL1, which comes after"),
    ("0F0 0RL0 0B0 0F1 0B1 0RG", 1, "needs 0OF0, which no rank runs"),
    ("0F0 0B0 0OF0 0F1 0B1 0RG", 2, "backward of this micro-batch is over"),
    ("0GP 0F0 0B0 0F1 0B1 0RG", 0, "never freed"),
    ("0GP 0F0 0FP 0B0 0F1 0B1 0RG", 3, "not gathered"),
    ("0GP 0GP 0F0 0B0 0F1 0B1 0FP 0RG", 1, "already gathered"),
    ("0GP 0F0 0B0 0F1 0B1 0FP 0FP 0RG", 6, "freed, but not gathered"),
    ("0F0 0B0 0GP 0F1 0B1 0FP 0RG", 0, "not gathered"),
]


@pytest.mark.parametrize(("row", "place", "said"), BROKEN)
def test_one_rank_broken(row: str, place: int, said: str) -> None:
    with pytest.raises(IllegalSchedule) as caught:
        check(listed("broken", [row], (0,), 2))
    message = str(caught.value)
    assert said in message.splitlines()[0] and (caught.value.rank, caught.value.place) == (0, place), message


@pytest.mark.parametrize(
    "row",
    [ONE, "0F0 0F1 0I0 0I1 0W1 0W0 0RG", "0GP 0F0 0FP 0GP 0B0 0F1 0B1 0RG 0FP", "0F0 0OF0 0F1 0B1 0RL0 0R0 0B0 0RG"],
)
def test_one_rank_legal(row: str) -> None:
    check(listed("legal", [row], (0,), 2))


def test_the_arrow_points_at_the_action() -> None:
    with pytest.raises(IllegalSchedule) as caught:
        check(listed("broken", ["0F0 0B0 0RG", "1B0 1F0 1RG"], (0, 1), 1))
    _, *lines = str(caught.value).splitlines()
    arrow = next(i for i, line in enumerate(lines) if "^" in line)
    assert lines[arrow - 1].startswith("rank 1") and lines[arrow - 1][lines[arrow].index("^") :].startswith("1B0")


def test_the_arrow_is_found_in_a_long_schedule() -> None:
    schedule = gpipe(4, 64)
    row = list(schedule.ranks[2])
    row[100], row[101] = row[101], row[101]
    with pytest.raises(IllegalSchedule) as caught:
        check(replace(schedule, ranks=(*schedule.ranks[:2], tuple(row), schedule.ranks[3])))
    lines = str(caught.value).splitlines()
    arrow = next(i for i, line in enumerate(lines) if "^" in line)
    assert "place 101" in lines[arrow] and lines[arrow - 1][lines[arrow].index("^") :].startswith(str(row[101]))
    assert len(lines) == 6 and all(len(line) <= 125 for line in lines[1:])


def test_wrong_rank() -> None:
    with pytest.raises(IllegalSchedule, match="stage 1 is placed on rank 1"):
        check(listed("broken", ["0F0 1F0 0B0 0RG", "1B0 1RG"], (0, 1), 1))
    with pytest.raises(IllegalSchedule, match="placed on rank 5"):
        check(listed("broken", ["0F0 0B0 0RG"], (5,), 1))


def test_forward_only_has_no_backward() -> None:
    check(listed("forward", ["0F0 0F1"], (0,), 2, trains=False))
    with pytest.raises(IllegalSchedule, match="does not train"):
        check(listed("forward", ["0F0 0F1 0B0"], (0,), 2, trains=False))
    with pytest.raises(IllegalSchedule, match="0B0 is missing"):
        check(listed("training", ["0F0 0F1"], (0,), 2))


def test_a_ring_of_waits_is_found() -> None:
    """Rank 0 wants the gradient of 0 before it gives 1; rank 1 wants both inputs first."""
    stuck = listed("ring", ["0F0 0B0 0F1 0B1 0RG", "1F0 1F1 1B0 1B1 1RG"], (0, 1), 2)
    with pytest.raises(IllegalSchedule) as caught:
        check(stuck)
    said = str(caught.value).splitlines()[0]
    assert "rank 0: 0B0 waits for 1B0" in said and "rank 1: 1F1 waits for 0F1" in said
    with pytest.raises(IllegalSchedule, match="wait for each other"):
        check(with_transfers(stuck))


def swapped(schedule: Schedule, first: str, second: str) -> Schedule:
    """Two actions exchange their places."""
    a, b = parse(first), parse(second)
    other = {a: b, b: a}
    return replace(schedule, ranks=tuple(tuple(other.get(x, x) for x in row) for row in schedule.ranks))


def without(schedule: Schedule, *words: str) -> Schedule:
    gone = {parse(w) for w in words}
    return replace(schedule, ranks=tuple(tuple(a for a in row if a not in gone) for row in schedule.ranks))


@pytest.mark.parametrize("word", ["0SF1", "1RF1", "1SB0", "0RB0", "2SB1", "1RB1"])
def test_every_missing_transfer_is_found(word: str) -> None:
    with pytest.raises(IllegalSchedule, match=f"{word}"):
        check(without(with_transfers(gpipe(3, 2)), word))


def test_a_missing_pair_is_found() -> None:
    """Both ends gone: F would fall back to waiting for the other rank's F."""
    with pytest.raises(IllegalSchedule, match="0SF1 is missing"):
        check(without(with_transfers(gpipe(3, 2)), "0SF1", "1RF1"))


def test_receives_keep_the_order_of_the_sends() -> None:
    early = listed(
        "crossed",
        ["0F0 0F1 0SF0 0SF1 0RB0 0B0 0RB1 0B1 0RG", "1RF1 1RF0 1F0 1F1 1B0 1B1 1SB0 1SB1 1RG"],
        (0, 1),
        2,
    )
    with pytest.raises(IllegalSchedule, match="rank 0 sends the tensor of 1RF0 before the tensor of this receive"):
        check(early)
    check(swapped(early, "1RF0", "1RF1"))


def test_no_single_removal_or_repetition_goes_unseen() -> None:
    schedule = with_transfers(one_f_one_b(3, 3))
    for rank, place, action in schedule.actions():
        for middle in ((), (action, action)):
            row = schedule.ranks[rank]
            broken = (*row[:place], *middle, *row[place + 1 :])
            with pytest.raises(IllegalSchedule):
                check(replace(schedule, ranks=(*schedule.ranks[:rank], broken, *schedule.ranks[rank + 1 :])))


def test_printed_words_read_back() -> None:
    for op in Op:
        for action in (Action(op, 12, 3), Action(op, 0)):
            assert parse(str(action)) == action
