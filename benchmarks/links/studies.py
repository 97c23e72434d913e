"""Losses of all methods: the same small budget for every one's learning rate, then the seeds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from threading import Lock
from typing import Any

from links import apart, setting
from links.keep import Kept
from links.losses import EVERY_STEP, Study, crossing

Say = Callable[[str], None]
_HERE = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True)
class Budget:
    """`rates` are tried on `tune_tokens` with the first seed; one alone is not tried. `after`, `beta2`: see Study."""

    tokens: int
    seeds: int
    rates: tuple[float, ...]
    tune_tokens: int
    precision: str
    jobs: int
    after: int = 0
    beta2: float = setting.BETAS[1]


@dataclass(frozen=True, slots=True)
class Subject:
    """What has a loss of its own."""

    exchange: Any
    hosts: int
    islands: tuple[int, ...] = ()
    sync: Any = EVERY_STEP
    model: str = setting.GPT2

    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


def losses(subjects: Iterable[Subject], budget: Budget, kept: Kept, say: Say) -> dict[str, dict[str, Any]]:
    """By the subject's key: rate, final losses by seed, curves."""
    some = {s.key(): s for s in subjects}
    for one in {s.hosts: s for s in some.values()}.values():
        apart.common(_study(one, budget, 0.0, 0, 0))
    trials = [_study(s, budget, lr, 0, budget.tune_tokens) for s in some.values() for lr in budget.rates]
    if len(budget.rates) > 1:
        _all(trials, budget, kept, say)
    best = {key: _best(s, budget, kept) for key, s in some.items()}
    runs = {
        key: [_study(s, budget, best[key], seed, budget.tokens) for seed in range(budget.seeds)]
        for key, s in some.items()
    }
    _all([study for mine in runs.values() for study in mine], budget, kept, say)
    return {key: _summary(best[key], [kept.get(s.key()) for s in mine]) for key, mine in runs.items()}


def seconds_to(found: dict[str, Any], target: float, *, tokens_per_s: float) -> float | None:
    """Mean over the seeds; None where a seed never came there."""
    at = [crossing(curve, target) for curve in found["curves"]]
    reached = [a for a in at if a is not None]
    return mean(reached) / tokens_per_s if reached and len(reached) == len(at) else None


def _study(subject: Subject, budget: Budget, lr: float, seed: int, tokens: int) -> Study:
    given = (subject.exchange, subject.hosts, seed, lr, tokens, subject.islands, budget.precision)
    return Study(*given, sync=subject.sync, after=budget.after, beta2=budget.beta2, model=subject.model)


def _best(subject: Subject, budget: Budget, kept: Kept) -> float:
    if len(budget.rates) == 1:
        return budget.rates[0]
    tried = {lr: kept.get(_study(subject, budget, lr, 0, budget.tune_tokens).key()) for lr in budget.rates}
    good = {lr: found["final"] for lr, found in tried.items() if found["final"] == found["final"]}
    return min(good, key=lambda lr: good[lr]) if good else min(budget.rates)


def _summary(lr: float, found: list[dict[str, Any]]) -> dict[str, Any]:
    finals = [f["final"] for f in found]
    return {
        "lr": lr,
        "final_losses": [round(x, 5) for x in finals],
        "final_loss": mean(finals),
        "last_on_the_way": mean(f["curve"][-1][1] for f in found),  # over the sequences of the curves
        "curves": [f["curve"] for f in found],
        "sent_bytes": [f["sent_bytes"] for f in found if "sent_bytes" in f],
    }


def _all(studies: list[Study], budget: Budget, kept: Kept, say: Say) -> None:
    open_ones = list({s.key(): s for s in studies if kept.get(s.key()) is None}.values())
    turn = Lock()

    def one(study: Study) -> None:
        found = _apart(study)
        with turn:
            kept.put(study.key(), found)
            say(f"loss {found['final']:.4f} after {study.tokens} tokens, {found['seconds']:.0f} s: {study.key()}")

    with ThreadPoolExecutor(budget.jobs) as pool:
        list(pool.map(one, open_ones))


def _apart(study: Study) -> dict[str, Any]:
    """In a process of its own, on one thread."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_HERE), "TRANSFORMERS_VERBOSITY": "error"}
    argv = [sys.executable, "-m", "links.losses"]
    done = subprocess.run(argv, input=json.dumps(asdict(study)), env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{study.key()}: {done.stderr.strip().splitlines()[-1]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))
