"""CO2 (Sun et al., arXiv 2401.16265): a round's exchange is hidden behind the next round, so steps cost what they cost
alone: 100 % of the throughput without communication.

Two hosts at 100 Mbit/s, a GPT-2 of 17.4M parameters, float32 displacements of 70 MB every 8 steps: 5.6 s on the wire
of some 13 s that a round computes. Local SGD of the same period waits for them.
"""

from __future__ import annotations

from functools import partial

from claims import Row, Study, is_reached
from claims._trials import Trials
from links.method import ALONE, Method
from links.rounds import Length, Link, measure

EVERY, RATE = 8, "100mbit"


def studies(*, quick: bool) -> list[Study]:
    return [Study("speed", partial(rows, Length(EVERY * (1 if quick else 3), 2, 400.0)))]


def rows(length: Length, trials: Trials) -> list[Row]:
    """Means over whole rounds: a median would be a step that exchanges nothing."""
    link = Link(hosts=2, rate=RATE)
    ways = {
        name: Method(name, False, {"exchange": "dense", "sync": {name: {"sync_every": EVERY}}}, period=EVERY)
        for name in ("co2", "local_sgd")
    }
    steps = f"{length.steps} steps"
    found = {name: trials(f"{name}, {steps}", partial(measure, method, link, length)) for name, method in ways.items()}
    alone = trials(f"alone, {steps}", partial(measure, ALONE, Link(hosts=2), length))
    step_s = {name: one["step_s"] for name, one in found.items()}
    ratio = round(alone["step_s"] / step_s["co2"], 3)
    return [
        Row(
            method="co2",
            claim="steps per second of those of hosts that exchange nothing",
            baseline="two hosts that exchange nothing",
            ratio=ratio,
            paper_ratio=1.0,
            setting=f"GPT-2 of 17.4M parameters, 2 hosts, {RATE}, a round of {EVERY} steps in float32",
            holds=is_reached(ratio, 1.0),
            details={
                "of_local_sgd": round(alone["step_s"] / step_s["local_sgd"], 3),
                "step_s": {name: round(s, 3) for name, s in step_s.items()} | {"alone": round(alone["step_s"], 3)},
                "steps_s": found["co2"]["steps_s"],
            },
        )
    ]
