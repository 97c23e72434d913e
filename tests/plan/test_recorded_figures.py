"""The clock beside the models of time that it replaced: the figures they gave, written down before, to the last bit.

There were four: buckets of a step, rounds of local updates, pipeline schedules, and gathers of sharded states, which
no plan had used.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from gossamer.pipeline.passes import with_recompute, with_split_backward, with_transfers
from gossamer.pipeline.schedule import Schedule, StageCosts, build
from gossamer.pipeline.schedule_tasks import NamedLink, cost_of_schedule, tasks_of_schedule
from gossamer.plan.exchange import (
    BucketMeasurements,
    Candidate,
    Option,
    RoundMeasurements,
    StepMeasurements,
    SyncPeriod,
    choose,
    cost_of_step,
    forecast_apart,
    tasks_of_step,
)
from gossamer.spec.action import Op
from gossamer.spec.clock import compute, play
from gossamer.spec.cost import Cost
from gossamer.spec.network import Link

RECORDED = json.loads((Path(__file__).parent / "recorded_figures.json").read_text("utf-8"))
LOSS = (0.0, 1e-5, 1e-3, 0.02, 0.3)
KINDS = tuple(Candidate(f"m{i}", f"m{i}", lossy=i > 1) for i in range(5))


def facts_of(seed: int) -> StepMeasurements:
    """A step of up to 14 buckets, ready in any order, of which candidates serve some."""
    draw = Random(seed).random
    n = 1 + int(14 * draw())
    stolen = (0.0, 0.3, 1.0)[int(3 * draw())]
    scale, busy = 4.0 ** (4 * draw() - 2), draw() * 0.3
    buckets = []
    for b in range(n):
        ready = (b + 1 + (2 * draw() - 1) * (seed % 3)) / n
        options: list[Option | None] = []
        for c in range(5):
            cpu = busy * draw() / n if c else 0.0
            wire = scale * draw() / n / 3.0**c
            one = Option(cpu, wire, int(1e6 * wire), LOSS[c] * draw())
            options.append(one if c == 0 or draw() < 0.85 else None)
        buckets.append(BucketMeasurements((f"w{b}",), 1 + int(9 * draw()), max(0.0, ready), draw() / n, tuple(options)))
    return StepMeasurements(tuple(buckets), compute_s=1.0 + draw(), backward_s=1.0, stolen=stolen)


def figures(line: Cost) -> dict[str, Any]:
    """The figures of a step as they are written down; a sum's last bit depends on the version of Python."""
    return {
        "step_s": line.step_s.hex(),
        "exposed_s": line.exposed_s.hex(),
        "wire_s": pytest.approx(line.wire_s, rel=1e-12),
        "sent_bytes": sum(line.sent_bytes),
    }


@pytest.mark.parametrize("seed", range(len(RECORDED["steps"])))
def test_a_step_takes_what_it_took_and_the_same_is_chosen(seed: int) -> None:
    known, row = facts_of(seed), RECORDED["steps"][seed]
    for lossy in (False, True):
        chosen = choose(known, lossy=lossy, candidates=KINDS)
        waited = [chosen.waited[f"w{b}"].hex() for b in range(len(known.buckets))]
        found = {"written": chosen.written, "reason": chosen.reason, **figures(chosen.forecast), "waited": waited}
        assert (
            found | {"written": _as_json(chosen.written), "dearer": pytest.approx(chosen.dearer)}
            == (row["choices"][str(lossy).lower()])
        )
    draw = Random(1000 + seed).random
    mixed = []
    for bucket in known.buckets:
        served = [o for o in bucket.options if o is not None]
        mixed.append(served[int(draw() * len(served))])
    assert figures(cost_of_step(known, play(tasks_of_step(known, mixed)))) == row["mixed"]


def _as_json(written: object) -> object:
    return json.loads(json.dumps(written))


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
