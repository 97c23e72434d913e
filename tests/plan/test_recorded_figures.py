"""The clock beside the models of time that it replaced: the figures they gave, written down before, to the last bit.

Rounds of local updates and pipeline schedules. (The fourth model, of a step's buckets, has another law since messages
have a planned order: tests/plan/test_send_order.py.)
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from gossamer.pipeline.passes import with_recompute, with_split_backward, with_transfers
from gossamer.pipeline.schedule import Schedule, StageCosts, build
from gossamer.pipeline.schedule_tasks import NamedLink, cost_of_schedule, tasks_of_schedule
from gossamer.plan.exchange import (
    RoundMeasurements,
    SyncPeriod,
    forecast_apart,
)
from gossamer.spec.action import Op
from gossamer.spec.clock import compute, play
from gossamer.spec.network import Link

RECORDED = json.loads((Path(__file__).parent / "recorded_figures.json").read_text("utf-8"))


@pytest.mark.parametrize("seed", range(len(RECORDED["rounds"])))
def test_a_round_takes_what_it_took(seed: int) -> None:
    draw = Random(2000 + seed).random
    every = (4, 8, 16, 16, 64)[int(5 * draw())]
    step_s = 0.5 + draw()
    fragments = tuple(draw() * 4 ** (4 * draw() - 1) for _ in range(1 + int(4 * draw())))
    cpu_s = draw() * every * (0.3 if seed % 2 else 3)
    known = RoundMeasurements(step_s, fragments, cpu_s=cpu_s, stolen=draw(), second_moments_s=draw() * 20)
    line = forecast_apart(SyncPeriod(every, 0.1, (0, 16)[seed % 2]), known)
    found = {"step_s": line.step_s.hex(), "exposed_s": line.exposed_s.hex(), "delay": line.delay}
    assert found == RECORDED["rounds"][seed]


def schedule_of(seed: int, draw: Callable[[], float]) -> Schedule:
    name = ("gpipe", "one_f_one_b", "forward_only")[seed % 3]
    stages, microbatches = 1 + int(4 * draw()), 1 + int(7 * draw())
    made = build(name).make(stages=stages, ranks=stages, microbatches=microbatches)
    if made.trains:
        passes: tuple[Callable[[Schedule], Schedule], ...] = (lambda s: s, with_recompute, with_split_backward)
        made = passes[int(3 * draw())](made)
    return with_transfers(made)


def stage_costs(draw: Callable[[], float]) -> StageCosts:
    ops = (Op.F, Op.B, Op.B_INPUT, Op.B_WEIGHT, Op.RECOMPUTE)
    seconds = {op: draw() for op in ops}
    live, kept, boundary = int(100 * draw()), int(10 * draw()), int(50 * draw())
    return StageCosts(seconds=seconds, live_bytes=live, kept_bytes=kept, boundary_bytes=boundary)


def links_of(stages: int, draw: Callable[[], float]) -> dict[tuple[int, int], NamedLink]:
    """A link of each direction between neighbors, or one that all share."""

    def link(name: str) -> NamedLink:
        return NamedLink(name, Link(latency_s=draw() / 4, bytes_per_s=20 + 200 * draw()))

    is_shared = draw() < 0.5
    found = {(a, b): link(f"{a}>{b}") for a in range(stages) for b in range(stages) if abs(a - b) == 1}
    return dict.fromkeys(found, link("shared")) if is_shared else found


@pytest.mark.parametrize("seed", range(len(RECORDED["schedules"])))
def test_a_schedule_takes_what_it_took(seed: int) -> None:
    draw, row = Random(3000 + seed).random, RECORDED["schedules"][seed]
    schedule = schedule_of(seed, draw)
    costs = [stage_costs(draw) for _ in range(schedule.stages)]
    links = links_of(schedule.stages, draw)
    trace = play(tasks_of_schedule(schedule, costs, links))
    busy = trace.busy_s()
    assert trace.end_s.hex() == row["makespan_s"]
    own = [float.fromhex(seconds) for seconds in row["busy_s"]]  # then a sum of differences, now of durations
    assert [busy[compute(rank)] for rank in range(schedule.stages)] == pytest.approx(own, rel=1e-12)
    told = cost_of_schedule(schedule, costs, links)
    assert list(told.peak_bytes or (0,) * schedule.stages) == row["peak_bytes"]
    assert told.wire_bytes == row["link_bytes"]
    assert told.step_s == pytest.approx(told.compute_s + told.exposed_s + told.bubble_s)
