"""A run that never was: records of a plausible shape, the same for the same arguments."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from gossamer.spec.records import End, Evaluation, Event, Record, Sample, Saved, Start, Step

STEP_S = 0.5


def start(step: int = 0, steps: int = 200, *, time_s: float = 0.0, peak: float = 5e10) -> Start:
    return Start(
        time_s=time_s,
        ranks=2,
        step=step,
        steps=steps,
        model="llama",
        parameters=3_150_000,
        data="stdlib",
        tokens_per_step=4096,
        flop_per_token=1.9e6,
        peak_flop_per_s=peak,
        exchange="dense",
        loss_unit="nats/token",
    )


def step(number: int, *, time_s: float | None = None, loss: float | None = None, committed: bool = True) -> Step:
    noise = random.Random(number).gauss(0, 0.04)
    return Step(
        time_s=STEP_S * number if time_s is None else time_s,
        step=number,
        committed=committed,
        loss=1.6 + 3.9 * math.exp(-number / 30) + noise if loss is None else loss,
        weight=4064.0,
        tokens=4096,
        samples=(32 * number, 32 * number + 32),
        lr=3e-4,
        grad_norm=1.25,
        step_s=STEP_S,
        compute_s=0.46,
        exposed_s=0.04,
        wire_bytes={"0>1": 12_600_000, "0>2": 2048},
        peak_bytes=412 * 2**20,
        data_s=0.001,
    )


def run(steps: int = 200, *, until: int | None = None, first: int = 0, ends: bool = True) -> Iterator[Record]:
    """A run over `steps`; stops short at `until`."""
    yield start(first, steps, time_s=STEP_S * first)
    until = steps if until is None else until
    for number in range(first + 1, until + 1):
        now = STEP_S * number
        yield step(number)
        if number % 50 == 0:
            loss = 1.66 + 3.9 * math.exp(-number / 30)
            yield Evaluation(
                time_s=now, step=number, loss=loss, bits_per_byte=loss / math.log(2), sequences=64, seconds=1.5
            )
        if number % 100 == 0:
            path = f"checkpoints/step-{number:08d}"
            yield Saved(time_s=now, step=number, path=path, bytes=37_800_000, copy_s=0.01, write_s=0.2)
        if number == 60:
            yield Event(time_s=now, level="warning", message="loss was nan: step rejected", step=60, rank=1)
    if ends:
        now = STEP_S * until
        yield Sample(time_s=now, step=until, prompt="def ", text="main(self):\n    return self")
        yield End(time_s=now, step=until, outcome="done", seconds=now)
