"""Stages on several ranks each: legal in every shape, never slower than the same stages on one rank each."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from gossamer.pipeline.passes import spread, with_recompute, with_split_backward, with_transfers
from gossamer.pipeline.schedule import Schedule, StageCosts, build
from gossamer.pipeline.schedule._assign import deal
from gossamer.pipeline.schedule_tasks import cost_of_schedule
from gossamer.pipeline.validate import IllegalSchedule, check
from gossamer.spec.action import Action, Op
from pipeline.orders import gpipe, one_f_one_b, parse, split_1f1b, unit_costs

SHAPES = {stages: list(product((1, 2, 3), repeat=stages)) for stages in (1, 2, 3, 4)}
MAKERS = {"gpipe": gpipe, "1f1b": one_f_one_b, "split 1f1b": split_1f1b}


def groups_of(counts: tuple[int, ...]) -> list[tuple[int, ...]]:
    firsts = [sum(counts[:stage]) for stage in range(len(counts))]
    return [tuple(range(first, first + k)) for first, k in zip(firsts, counts, strict=True)]


def wide(name: str, counts: tuple[int, ...], microbatches: int) -> Schedule:
    groups = groups_of(counts)
    dealt = [deal(g, [microbatches // len(g) + (i < microbatches % len(g)) for i in range(len(g))]) for g in groups]
    return spread(lambda stages: MAKERS[name](stages, microbatches), groups, dealt)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("stages", [1, 2, 3, pytest.param(4, marks=pytest.mark.nightly)])
def test_every_shape_is_legal(name: str, stages: int) -> None:
    for counts in SHAPES[stages]:
        for microbatches in (max(counts), 4, 7):
            schedule = wide(name, counts, microbatches)
            check(schedule)
            check(with_transfers(schedule))
            check(with_transfers(with_recompute(schedule)))
            check(with_transfers(with_split_backward(schedule)))


@pytest.mark.parametrize("name", MAKERS)
def test_one_rank_per_stage_is_what_it_was(name: str) -> None:
    for stages in (1, 2, 4):
        narrow, regular = wide(name, (1,) * stages, 5), MAKERS[name](stages, 5)
        assert with_transfers(narrow).ranks == with_transfers(regular).ranks
        assert narrow.placement == regular.placement


def test_micro_batches_are_dealt_in_turns() -> None:
    assert deal((4, 5), (3, 3)) == (4, 5, 4, 5, 4, 5)
    assert deal((0, 1, 2), (4, 2, 1)) == (0, 1, 0, 2, 0, 1, 0)
    assert deal((7,), (3,)) == (7, 7, 7)


@pytest.mark.parametrize(
    ("counts", "live"),
    [
        ((1, 3, 1), (7, 2, 2, 2, 1)),
        ((2, 1), (2, 2, 1)),
        ((1, 2), (3, 1, 1)),
        ((2, 4, 1), (5, 5, 2, 2, 2, 2, 1)),
        ((3, 3), (2, 2, 2, 1, 1, 1)),
        ((3, 2), (2, 2, 2, 1, 1)),
        ((1, 1, 1), (3, 2, 1)),
    ],
)
def test_ranks_of_a_stage_share_its_work(counts: tuple[int, ...], live: tuple[int, ...]) -> None:
    """A stage of k times the work on k ranks: the pipeline is as busy as one of equal stages."""
    microbatches = 24
    costs = [StageCosts(seconds={Op.F: 1.0 * k, Op.B: 2.0 * k}, live_bytes=1) for k in counts]
    told = cost_of_schedule(with_transfers(wide("1f1b", counts, microbatches)), costs)
    ranks = sum(counts)
    assert told.bubble_s / told.step_s <= (ranks - 1) / (microbatches + ranks - 1) + 1e-9, (
        "a chain of as many ranks is no busier"
    )
    assert told.exposed_s == 0 and told.peak_bytes == live


def test_who_has_a_part() -> None:
    schedule = wide("1f1b", (2, 1), 4)
    assert (schedule.ranks_of(0), schedule.ranks_of(1), schedule.placement) == ((0, 1), (2,), (0, 2))
    assert [sorted(schedule.batches_of(rank)) for rank in range(3)] == [[0, 2], [1, 3], [0, 1, 2, 3]]
    assert schedule.crosses(0, 1) and not schedule.crosses(1, 1) and not schedule.crosses(-1, 0)


def test_what_is_done_by_the_wrong_rank_or_by_no_one_is_found() -> None:
    schedule = wide("gpipe", (2, 1), 4)
    for rank, place, action in schedule.actions():
        row = schedule.ranks[rank]
        gone = (*row[:place], *row[place + 1 :])
        with pytest.raises(IllegalSchedule, match=f"{action} is missing in the list of rank {rank}|which no rank runs"):
            check(replace(schedule, ranks=(*schedule.ranks[:rank], gone, *schedule.ranks[rank + 1 :])))
    moved = {Action(Op.F, 0, 0): "0F1", Action(Op.F, 0, 1): "0F0"}
    rows = tuple(tuple(parse(moved[a]) if a in moved else a for a in row) for row in schedule.ranks)
    with pytest.raises(IllegalSchedule, match="rank 1 runs this micro-batch"):
        check(replace(schedule, ranks=rows))


def test_forward_only_with_fewer_micro_batches_than_ranks() -> None:
    def straight(stages: int) -> Schedule:
        return build("forward_only").make(stages=stages, ranks=stages, microbatches=1)

    schedule = with_transfers(spread(straight, [(0, 1), (2, 3)], [(0,), (2,)]))
    check(schedule)
    assert [" ".join(map(str, row)) for row in schedule.ranks] == ["0F0 0SF0", "", "1RF0 1F0", ""]
    told = cost_of_schedule(schedule, unit_costs(2))
    assert told.step_s == 2 and told.peak_bytes == (1, 0, 1, 0)
