"""Run folders of a plausible shape, written without training: 1,000 short ones, or one of 100,000 steps."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path

from gossamer.spec.config import RunConfig
from gossamer.spec.cost import Cost
from gossamer.spec.plan import MeshSizes, Plan
from gossamer.spec.records import End, Evaluation, Event, Record, Sample, Saved, Start, Step
from gossamer.view.run_directory import RunDirectory

STEP_S = 0.5
BEGAN_S = 1_795_000_000.0


def make_run(folder: Path, *, steps: int, seed: int = 0) -> RunDirectory:
    """Write a run of `steps` steps with all its files but checkpoints; the same for the same arguments."""
    run = RunDirectory(folder)
    run.keep(RunConfig.model_validate(_settings(steps)), {"train.steps": "run.yaml:6", "train.batch": "run.yaml:5"})
    run.keep_plan(_plan())
    with run.records_file.open("w") as out:  # one by one, `append` opens the file for each
        out.writelines(record.line() + "\n" for record in _records(steps, seed))
    return run


def _settings(steps: int) -> dict[str, object]:
    return {
        "model": {"hf": "llama", "config": {"hidden_size": 128}},
        "data": {"source": "text:corpus/*.txt", "tokenizer": "byte", "sequence": 128},
        "train": {"steps": steps, "batch": 32, "optimizer": {"adamw": {"lr": 1e-3}}},
        "machines": {"processes": 2},
    }


def _plan() -> Plan:
    reasons = {"exchange": "two_shot int8: 100 Mbit/s between hosts hide 40 % of an all-reduce under the backward pass"}
    forecast = Cost(
        compute_s=0.44, exposed_s=0.05, step_s=0.49, state_bytes=(50_000_000,) * 2, wire_bytes={"0>1": 12_500_000}
    )
    return Plan(
        mesh=MeshSizes(replica=2),
        batch_fractions=(0.5, 0.5),
        rows=(16, 16),
        microbatches=(1, 1),
        reasons=reasons,
        forecast=forecast,
    )


def _records(steps: int, seed: int) -> Iterator[Record]:
    noise = random.Random(seed)
    yield _start(steps)
    for number in range(1, steps + 1):
        now_s, level = BEGAN_S + STEP_S * number, _loss(number)
        yield _step(number, level, noise)
        if number % max(1, steps // 50) == 0:
            loss = level + 0.06
            yield Evaluation(
                time_s=now_s, step=number, loss=loss, bits_per_byte=loss / math.log(2), sequences=64, seconds=1.5
            )
            yield Saved(
                time_s=now_s,
                step=number,
                path=f"checkpoints/step-{number:08d}",
                bytes=37_800_000,
                copy_s=0.01,
                write_s=0.2,
            )
        if number % max(2, steps // 20) == 1:
            yield Event(time_s=now_s, level="warning", message="loss was nan: step rejected", step=number, rank=1)
    now_s = BEGAN_S + STEP_S * steps
    yield Sample(time_s=now_s, step=steps, prompt="def ", text="main(self):\n    return self")
    yield End(time_s=now_s, step=steps, outcome="done", seconds=STEP_S * steps)


def _start(steps: int) -> Start:
    return Start(
        time_s=BEGAN_S,
        ranks=2,
        step=0,
        steps=steps,
        model="llama",
        parameters=3_150_000,
        trained=3_150_000,
        data="text:corpus/*.txt",
        tokens_per_step=4096,
        flop_per_token=1.9e6,
        peak_flop_per_s=5e10,
        exchange="error_feedback(two_shot=int8)",
        precision="fp32",
        loss_unit="nats/token",
        versions={"gossamer": "0.1.0", "torch": "2.13.0+cpu", "python": "3.11.7"},
        machine={"host": "a", "processor": "AMD EPYC", "cores": "2", "device": "cpu", "system": "Linux"},
        data_fingerprint="0123456789abcdef" * 4,
    )


def _loss(number: int) -> float:
    return 1.6 + 3.9 * math.exp(-number / 300) + 0.8 / (1 + number / 5000)


def _step(number: int, level: float, noise: random.Random) -> Step:
    spent_s = STEP_S * math.exp(noise.gauss(0, 0.05)) * (4 if noise.random() < 0.0005 else 1)
    return Step(
        time_s=BEGAN_S + STEP_S * number,
        step=number,
        committed=True,
        loss=level + noise.gauss(0, 0.05) + (1.5 if noise.random() < 0.0001 else 0.0),
        weight=4064.0,
        tokens=4096,
        samples=(32 * number, 32 * number + 32),
        lr=1e-3 * 0.5 * (1 + math.cos(math.pi * min(1.0, number / 100_000))),
        grad_norm=1.25 * math.exp(noise.gauss(0, 0.2)),
        step_s=spent_s,
        compute_s=spent_s * 0.86,
        exposed_s=spent_s * 0.1,
        wire_bytes={"0>1": 12_600_000 + noise.randrange(10_000), "0>2": 2048},
        peak_bytes=min(412, 300 + number) * 2**20,
        data_s=0.001,
    )
