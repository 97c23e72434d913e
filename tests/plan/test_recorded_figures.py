"""The clock beside the models of time that it replaced: the figures they gave, written down before, to the last bit.

There were four: buckets of a step, rounds of local updates, pipeline schedules, and gathers of sharded states, which
no plan had used.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

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
from gossamer.spec.clock import play
from gossamer.spec.cost import Cost

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
