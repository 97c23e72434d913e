"""Schedules on the clock against golden values (unit costs F = 1, B = 2), and against sums done by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from gossamer.pipeline.passes import with_transfers
from gossamer.pipeline.schedule import Schedule, StageCosts, build
from gossamer.pipeline.schedule_tasks import NamedLink, cost_of_schedule, tasks_of_schedule
from gossamer.pipeline.validate import check
from gossamer.spec.action import Action, Op
from gossamer.spec.clock import compute, play, wire
from gossamer.spec.cost import Cost
from gossamer.spec.network import Link
from pipeline.orders import gpipe, listed, one_f_one_b, split_1f1b, unit_costs, vee

GOLDEN = [
    (gpipe(4, 8), 33, 0.2727, (8, 8, 8, 8)),
    (one_f_one_b(4, 8), 33, 0.2727, (4, 3, 2, 1)),
    (split_1f1b(4, 8), None, None, (4, 3, 2, 1)),
    (gpipe(4, 16), 57, 0.1579, (16, 16, 16, 16)),
    (one_f_one_b(4, 16), 57, 0.1579, (4, 3, 2, 1)),
    (gpipe(2, 8), 27, 0.1111, (8, 8)),
    (one_f_one_b(2, 8), 27, 0.1111, (2, 1)),
    (gpipe(1, 5), 15, 0.0, (5,)),
]


def bubble_of(told: Cost) -> float:
    """The idle part of the ranks' time; waiting for links is idle time."""
    return 1 - told.compute_s / told.step_s


def link(name: str, latency_s: float, bytes_per_s: float) -> NamedLink:
    return NamedLink(name, Link(latency_s=latency_s, bytes_per_s=bytes_per_s))


@pytest.mark.parametrize("lower", [lambda s: s, with_transfers], ids=["compute only", "with transfers"])
@pytest.mark.parametrize(("schedule", "makespan", "bubble", "peak"), GOLDEN, ids=lambda v: getattr(v, "name", None))
def test_golden(lower, schedule: Schedule, makespan: float | None, bubble: float | None, peak: tuple[int, ...]) -> None:
    schedule = lower(schedule)
    check(schedule)
    told = cost_of_schedule(schedule, unit_costs(schedule.stages))
    assert told.peak_bytes == peak
    if makespan is None:  # the weight gradient is off the path between the stages
        assert told.step_s < 33
    else:
        assert told.step_s == makespan and bubble_of(told) == pytest.approx(bubble, abs=5e-5)


@pytest.mark.parametrize(
    ("schedule", "costs", "makespan"),
    [
        (one_f_one_b(4, 8), unit_costs(4, b=3.0), 44),  # recomputed inside B
        (one_f_one_b(4, 8, early_recompute=(0, 1, 2)), [*unit_costs(3), *unit_costs(1, b=3.0)], 41),
        (one_f_one_b(4, 8, early_recompute=(0, 1, 2)), unit_costs(4), 39),  # the last stage keeps everything
    ],
)
def test_golden_recompute(schedule: Schedule, costs: list[StageCosts], makespan: float) -> None:
    check(schedule)
    assert cost_of_schedule(schedule, costs).step_s == makespan


@pytest.mark.parametrize(("stages", "microbatches"), [(4, 8), (4, 16), (2, 8), (3, 2), (1, 5)])
def test_makers_give_the_textbook_orders(stages: int, microbatches: int) -> None:
    for name, order in (("gpipe", gpipe), ("one_f_one_b", one_f_one_b)):
        made = build(name).make(stages=stages, ranks=stages, microbatches=microbatches)
        assert made.ranks == order(stages, microbatches).ranks


def test_one_stage_has_no_bubble() -> None:
    told = cost_of_schedule(build("single_stage").make(stages=1, ranks=1, microbatches=6), unit_costs(1))
    assert (told.step_s, told.bubble_s, told.peak_bytes) == (18, 0.0, (1,))


def test_forward_only_bubble_and_memory() -> None:
    told = cost_of_schedule(build("forward_only").make(stages=4, ranks=4, microbatches=8), unit_costs(4))
    assert told.step_s == 11 and told.bubble_s == pytest.approx(3) and told.peak_bytes == (1, 1, 1, 1)


TWO = listed("two", ["0F0 0B0 0RG", "1F0 1B0 1RG"], (0, 1), 1)


def test_transfers_take_latency_and_rate() -> None:
    costs = [replace(c, boundary_bytes=100) for c in unit_costs(2)]
    links = {(0, 1): link("up", 0.5, 50.0), (1, 0): link("down", 0.25, 200.0)}
    trace = play(tasks_of_schedule(with_transfers(TWO), costs, links))
    assert trace.end_s == 1 + (2.0 + 0.5) + 1 + 2 + (0.5 + 0.25) + 2
    assert [trace.busy_s()[compute(rank)] for rank in (0, 1)] == [3.0, 3.0]
    assert trace.sent_bytes() == {"up": 100, "down": 100}
    (sent,) = (i for i, task in enumerate(trace.tasks) if task.on == wire("up"))
    assert (trace.starts[sent], trace.ends[sent]) == (1.0, 3.5)
    told = cost_of_schedule(with_transfers(TWO), costs, links)
    assert (told.exposed_s, told.bubble_s) == (2.0 + 0.5 + 0.5 + 0.25, 3.0), "the messages, and the other's work"


def test_a_shared_link_takes_one_message_at_a_time() -> None:
    forward = build("forward_only").make(stages=3, ranks=3, microbatches=2)
    costs = [StageCosts(seconds={Op.F: 1.0}, boundary_bytes=4)] * 3
    own = cost_of_schedule(with_transfers(forward), costs, {(0, 1): link("a", 0, 1), (1, 2): link("b", 0, 1)})
    shared = cost_of_schedule(with_transfers(forward), costs, {(0, 1): link("a", 0, 1), (1, 2): link("a", 0, 1)})
    # Own: F 0-1, F 1-2 | 0SF0 1-5, 0SF1 5-9 | F 5-6, F 9-10 | 1SF0 6-10, 1SF1 10-14 | F 14-15.
    assert own.step_s == 15 and own.wire_bytes == {"a": 8, "b": 8}
    # Shared: 1SF0 waits for 0SF1 and so on: 0SF0 1-5, 0SF1 5-9, 1SF0 9-13, 1SF1 13-17, F 17-18.
    assert shared.step_s == 18 and shared.wire_bytes == {"a": 16}


def test_bytes_follow_recompute_and_offload() -> None:
    costs, ones = ([StageCosts(seconds={Op.F: 1}, live_bytes=a, kept_bytes=b)] for a, b in ((10, 2), (1, 1)))
    lists = {
        "0F0 0F1 0B1 0B0 0RG": (20, 2),
        "0F0 0F1 0R1 0B1 0R0 0B0 0RG": (12, 2),
        "0F0 0OF0 0F1 0B1 0RL0 0B0 0RG": (10, 1),
        "0F0 0OF0 0F1 0R1 0B1 0RL0 0B0 0RG": (10, 1),
    }
    for row, (peak_bytes, peak_chunks) in lists.items():
        schedule = listed("memory", [row], (0,), 2)
        check(schedule)
        assert cost_of_schedule(schedule, costs).peak_bytes == (peak_bytes,), row
        assert cost_of_schedule(schedule, ones).peak_bytes == (peak_chunks,), row


def test_neighbors_on_one_rank_hand_over_without_a_link() -> None:
    costs = [replace(c, boundary_bytes=1) for c in unit_costs(4)]
    schedule = with_transfers(vee(3))
    check(schedule)
    assert cost_of_schedule(schedule, costs).wire_bytes == {"0>1": 6, "1>0": 6}


def test_each_rank_does_one_thing_at_a_time_and_needs_come_first() -> None:
    schedule = with_transfers(one_f_one_b(4, 8))
    trace = play(tasks_of_schedule(schedule, unit_costs(4)))
    at: dict[Action, tuple[float, float]] = {}
    for rank, row in enumerate(schedule.ranks):
        mine = [i for i, task in enumerate(trace.tasks) if task.on == compute(rank)]
        done = [action for action in row if action.op not in (Op.SEND_F, Op.SEND_B)]
        spans = [(trace.starts[i], trace.ends[i]) for i in mine]
        at.update(zip(done, spans, strict=True))
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
        assert sum(end > start for start, end in spans) == 16
    for action, (start, _) in at.items():
        if action.op is Op.F and action.stage:
            assert start >= at[replace(action, stage=action.stage - 1)][1]
