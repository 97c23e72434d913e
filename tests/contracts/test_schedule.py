"""What every schedule maker must do; the makers are found by the room."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from gossamer.pipeline import schedule
from gossamer.pipeline.dependencies import Dependencies
from gossamer.pipeline.passes import with_transfers
from gossamer.pipeline.schedule import PipelineSchedule, Schedule, StageCosts
from gossamer.pipeline.schedule_tasks import cost_of_schedule, tasks_of_schedule
from gossamer.pipeline.validate import check
from gossamer.spec.action import Action, Op
from gossamer.spec.clock import compute, play
from gossamer.spec.errors import BadInput

SHAPES = [(s, r, m) for s, r in [(1, 1), (2, 1), (2, 2), (4, 2), (4, 4), (6, 3)] for m in (1, 2, 3, 4, 8)]
SECONDS = {Op.F: 1.0, Op.B: 2.0, Op.B_INPUT: 1.0, Op.B_WEIGHT: 1.0}


@pytest.fixture(params=schedule.names())
def maker(request: pytest.FixtureRequest) -> PipelineSchedule:
    return schedule.build(request.param)


def made(maker: PipelineSchedule) -> Iterator[tuple[tuple[int, int, int], Schedule]]:
    """Every shape the maker accepts; the others it must refuse as the user's error."""
    accepted = 0
    for stages, ranks, microbatches in SHAPES:
        try:
            yield (stages, ranks, microbatches), maker.make(stages=stages, ranks=ranks, microbatches=microbatches)
            accepted += 1
        except BadInput:
            continue
    assert accepted, "the maker accepts no shape at all"


def test_is_a_frozen_value(maker: PipelineSchedule) -> None:
    assert maker == dataclasses.replace(maker) and hash(maker) == hash(dataclasses.replace(maker))


def test_is_legal_with_and_without_transfers(maker: PipelineSchedule) -> None:
    for (stages, ranks, microbatches), one in made(maker):
        assert (one.stages, len(one.ranks), one.microbatches) == (stages, ranks, microbatches)
        check(one)
        check(with_transfers(one))


def test_the_same_question_gets_the_same_answer(maker: PipelineSchedule) -> None:
    for (stages, ranks, microbatches), one in made(maker):
        assert one == maker.make(stages=stages, ranks=ranks, microbatches=microbatches)


def test_prints_every_action_once(maker: PipelineSchedule) -> None:
    for _, one in made(maker):
        words = str(one).split()
        for _, _, action in one.actions():
            assert words.count(str(action)) == 1


def test_the_clock_agrees_with_the_work(maker: PipelineSchedule) -> None:
    """Busy time is the work there is, the makespan at least that of the fullest rank; nothing stays in memory."""
    costs = StageCosts(seconds=SECONDS, live_bytes=3, kept_bytes=3, boundary_bytes=5)
    for (stages, _, microbatches), one in made(maker):
        trace = play(tasks_of_schedule(with_transfers(one), [costs] * stages))
        told = cost_of_schedule(with_transfers(one), [costs] * stages)
        chunks = cost_of_schedule(
            with_transfers(one), [dataclasses.replace(costs, live_bytes=1, kept_bytes=1)] * stages
        ).peak_bytes
        per_chunk = 3.0 if one.trains else 1.0
        busy = [trace.busy_s()[compute(rank)] for rank in range(len(one.ranks))]
        assert sum(busy) == pytest.approx(stages * microbatches * per_chunk)
        assert max(busy) <= told.step_s + 1e-9 and -1e-9 <= told.bubble_s < told.step_s
        assert all(b == 3 * c >= 3 for b, c in zip(told.peak_bytes, chunks, strict=True))
        crossings = sum(a != b for a, b in zip(one.placement, one.placement[1:], strict=False))
        assert sum(told.wire_bytes.values()) == crossings * microbatches * 5 * (2 if one.trains else 1)


def test_memory_cap_is_kept_or_refused(maker: PipelineSchedule) -> None:
    """What is made under a cap stays below it on the clock; with room for everything there is no reason to refuse."""
    for (stages, ranks, microbatches), _ in made(maker):
        costs = [StageCosts(seconds=SECONDS, live_bytes=1)] * stages
        for cap in (stages * microbatches, 1):
            asked = {"costs": costs, "memory_cap": [cap] * ranks}
            try:
                capped = maker.make(stages=stages, ranks=ranks, microbatches=microbatches, **asked)
            except BadInput:
                assert cap < stages * microbatches
                continue
            check(capped)
            assert max(cost_of_schedule(capped, costs).peak_bytes) <= cap


@pytest.mark.parametrize("wrong", [{"stages": 0}, {"ranks": 0}, {"microbatches": 0}])
def test_nothing_to_do_is_the_users_error(maker: PipelineSchedule, wrong: dict[str, int]) -> None:
    with pytest.raises(BadInput):
        maker.make(**{"stages": 1, "ranks": 1, "microbatches": 1, **wrong})


def test_every_action_is_needed_or_ends_something(maker: PipelineSchedule) -> None:
    """No action is done for nothing: another needs it, or it is the last of its micro-batch or stage."""
    for _, one in made(maker):
        needs = Dependencies.of(one)
        needed = {n for _, _, a in one.actions() for n in needs(a)}
        for _, _, action in one.actions():
            ends = action.op is Op.REDUCE_GRADS or (
                not one.trains and action == Action(Op.F, one.stages - 1, action.batch)
            )
            assert action in needed or ends, action
