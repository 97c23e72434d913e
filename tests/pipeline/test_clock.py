"""The clock against golden values (unit costs F = 1, B = 2), and against sums done by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from gossamer.pipeline.passes import with_transfers
from gossamer.pipeline.schedule import Schedule, StageCosts, build
from gossamer.pipeline.simulator import SimulatedLink, forecast
from gossamer.pipeline.validate import check
from gossamer.spec.action import Op
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


@pytest.mark.parametrize("lower", [lambda s: s, with_transfers], ids=["compute only", "with transfers"])
@pytest.mark.parametrize(("schedule", "makespan", "bubble", "peak"), GOLDEN, ids=lambda v: getattr(v, "name", None))
def test_golden(lower, schedule: Schedule, makespan: float | None, bubble: float | None, peak: tuple[int, ...]) -> None:
    schedule = lower(schedule)
    check(schedule)
    trace = forecast(schedule, unit_costs(schedule.stages))
    assert trace.peak_chunks == trace.peak_bytes == peak
    if makespan is None:  # the weight gradient is off the path between the stages
        assert trace.makespan_s < 33
    else:
        assert trace.makespan_s == makespan and trace.bubble == pytest.approx(bubble, abs=5e-5)


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
    assert forecast(schedule, costs).makespan_s == makespan


@pytest.mark.parametrize(("stages", "microbatches"), [(4, 8), (4, 16), (2, 8), (3, 2), (1, 5)])
def test_makers_give_the_textbook_orders(stages: int, microbatches: int) -> None:
    for name, order in (("gpipe", gpipe), ("one_f_one_b", one_f_one_b)):
        made = build(name).make(stages=stages, ranks=stages, microbatches=microbatches)
        assert made.ranks == order(stages, microbatches).ranks


def test_one_stage_has_no_bubble() -> None:
    trace = forecast(build("single_stage").make(stages=1, ranks=1, microbatches=6), unit_costs(1))
    assert (trace.makespan_s, trace.bubble, trace.peak_chunks) == (18, 0.0, (1,))


def test_forward_only_bubble_and_memory() -> None:
    trace = forecast(build("forward_only").make(stages=4, ranks=4, microbatches=8), unit_costs(4))
    assert trace.makespan_s == 11 and trace.bubble == pytest.approx(3 / 11) and trace.peak_chunks == (1, 1, 1, 1)


TWO = listed("two", ["0F0 0B0 0RG", "1F0 1B0 1RG"], (0, 1), 1)


def test_transfers_take_latency_and_rate() -> None:
    costs = [replace(c, boundary_bytes=100) for c in unit_costs(2)]
    links = {(0, 1): SimulatedLink("up", 0.5, 50.0), (1, 0): SimulatedLink("down", 0.25, 200.0)}
    trace = forecast(with_transfers(TWO), costs, links)
    assert trace.makespan_s == 1 + (2.0 + 0.5) + 1 + 2 + (0.5 + 0.25) + 2
    assert trace.busy_s == (3.0, 3.0)
    assert trace.link_bytes == {"up": 100, "down": 100}
    arrival = next(s for s in trace.spans if str(s.action) == "0SF0")
    assert (arrival.start_s, arrival.end_s) == (1.0, 3.5)


def test_a_shared_link_takes_one_message_at_a_time() -> None:
    forward = build("forward_only").make(stages=3, ranks=3, microbatches=2)
    costs = [StageCosts(seconds={Op.F: 1.0}, boundary_bytes=4)] * 3
    own = forecast(with_transfers(forward), costs, {(0, 1): SimulatedLink("a", 0, 1), (1, 2): SimulatedLink("b", 0, 1)})
    shared = forecast(
        with_transfers(forward), costs, {(0, 1): SimulatedLink("a", 0, 1), (1, 2): SimulatedLink("a", 0, 1)}
    )
    # Own: F 0-1, F 1-2 | 0SF0 1-5, 0SF1 5-9 | F 5-6, F 9-10 | 1SF0 6-10, 1SF1 10-14 | F 14-15.
    assert own.makespan_s == 15 and own.link_bytes == {"a": 8, "b": 8}
    # Shared: 1SF0 waits for 0SF1 and so on: 0SF0 1-5, 0SF1 5-9, 1SF0 9-13, 1SF1 13-17, F 17-18.
    assert shared.makespan_s == 18 and shared.link_bytes == {"a": 16}


def test_bytes_follow_recompute_and_offload() -> None:
    costs = [StageCosts(seconds={Op.F: 1}, live_bytes=10, kept_bytes=2)]
    lists = {
        "0F0 0F1 0B1 0B0 0RG": (20, 2),
        "0F0 0F1 0R1 0B1 0R0 0B0 0RG": (12, 2),
        "0F0 0OF0 0F1 0B1 0RL0 0B0 0RG": (10, 1),
        "0F0 0OF0 0F1 0R1 0B1 0RL0 0B0 0RG": (10, 1),
    }
    for row, (peak_bytes, peak_chunks) in lists.items():
        schedule = listed("memory", [row], (0,), 2)
        check(schedule)
        trace = forecast(schedule, costs)
        assert (trace.peak_bytes, trace.peak_chunks) == ((peak_bytes,), (peak_chunks,)), row


def test_neighbours_on_one_rank_hand_over_without_a_link() -> None:
    costs = [replace(c, boundary_bytes=1) for c in unit_costs(4)]
    schedule = with_transfers(vee(3))
    check(schedule)
    assert forecast(schedule, costs).link_bytes == {"0-1": 6, "1-0": 6}


def test_each_rank_does_one_thing_at_a_time_and_needs_come_first() -> None:
    trace = forecast(with_transfers(one_f_one_b(4, 8)), unit_costs(4))
    for rank in range(4):
        mine = [s for s in trace.spans if s.rank == rank and s.action.op in (Op.F, Op.B)]
        assert len(mine) == 16 and all(a.end_s <= b.start_s for a, b in pairwise(mine))
    at = {s.action: s for s in trace.spans}
    for action, span in at.items():
        if action.op is Op.F and action.stage:
            assert span.start_s >= at[replace(action, stage=action.stage - 1)].end_s
