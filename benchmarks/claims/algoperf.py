"""AlgoPerf (Dahl et al., arXiv:2306.07179; results: arXiv:2502.15015) in small: time to a target on four workloads.

Every method gets the same number of trials, drawn quasi-randomly from one space for all workloads: the rate over a
factor of 32 around the method's own (Muon's by the rows of claims.muon), and the length of the schedule from a third to
all of the workload's steps. The fastest trial counts, and one that misses the target is infinitely slow. The target of
a workload is the best loss that AdamW and SGD with momentum reach in trials of 0.6 of its steps with other seeds.
Seconds are those of the processor, without evaluations.
A method of other files is a line of METHODS; one that this version does not have is left out by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from claims import Row, Study
from claims._score import drawn, geometric_speedup, scores, time_to
from claims._trials import Trials
from claims._workloads import WORKLOADS, Workload, followed
from gossamer import optimizer as optimizer_methods

TRIALS, EVALUATIONS, FOR_TARGET = 5, 10, 0.6


@dataclass(frozen=True, slots=True)
class Method:
    """`name` is that of the optimizer; `middle`: the middle of the rates; `written`: as in a configuration."""

    name: str
    middle: float
    written: Callable[[float], Any]
    is_claimed: bool = False


METHODS = (
    Method("adamw", 4e-3, lambda rate: {"adamw": {"lr": rate, "weight_decay": 0.01}}),
    Method("sgd", 0.2, lambda rate: {"sgd": {"lr": rate, "momentum": 0.9, "nesterov": True}}),
    Method(
        "muon",
        1.6e-2,
        lambda rate: {
            "muon": {
                "lr": rate,
                "weight_decay": 0.01,
                "matrices": [],
                "rest": {"adamw": {"lr": rate, "weight_decay": 0.01}},
            }
        },
        is_claimed=True,
    ),
    Method(
        "schedule_free_adamw",
        1e-2,
        lambda rate: {"schedule_free_adamw": {"lr": rate, "weight_decay": 0.01}},
        is_claimed=True,
    ),
    Method("eva", 0.1, lambda rate: {"eva": {"lr": rate}}, is_claimed=True),
)
BASELINES = ("adamw", "sgd")


def studies(*, quick: bool) -> list[Study]:
    return [Study("score", partial(score, WORKLOADS[1:2] if quick else WORKLOADS, 2 if quick else TRIALS))]


def target(work: Workload, count: int, trials: Trials) -> float:
    """Return the target of a workload: the best loss of the baselines at the end of shorter runs."""
    found = []
    for method in METHODS:
        if method.name in BASELINES:
            for index in range(count):
                seen = _trial(work, method, index, horizon=FOR_TARGET, seed=100 + index, trials=trials)
                found += [seen[-1][1]] if seen else []
    return min(loss for loss in found if math.isfinite(loss))


def score(works: tuple[Workload, ...], count: int, trials: Trials) -> list[Row]:
    mine = [method for method in METHODS if method.name in optimizer_methods.names()]
    missing = [method.name for method in METHODS if method not in mine]
    targets = {work.name: target(work, max(2, count - 2), trials) for work in works}
    times = {
        method.name: [fastest(work, method, targets[work.name], count, trials) for work in works] for method in mine
    }
    found = scores({name: [one["seconds"] for one in each] for name, each in times.items()})
    rows = []
    for method in mine:
        seconds = [one["seconds"] for one in times[method.name]]
        speedup = geometric_speedup(seconds, [one["seconds"] for one in times["adamw"]])
        has_ratio = speedup > 0 and math.isfinite(speedup)
        rows.append(
            Row(
                method=method.name,
                claim=f"AlgoPerf score among these methods{'; holds: above that of adamw' * method.is_claimed}",
                baseline="adamw",
                ratio=round(found[method.name], 4),
                paper_ratio=None,
                setting=f"{len(works)} workloads of some seconds on one core, {count} trials a method, one study",
                holds=found[method.name] > found["adamw"] if method.is_claimed else None,
                details={
                    "speedup": round(speedup, 4) if has_ratio else None,
                    "workloads": {
                        work.name: {
                            **one,
                            "seconds": one["seconds"] if math.isfinite(one["seconds"]) else None,
                            "target": round(targets[work.name], 5),
                        }
                        for work, one in zip(works, times[method.name], strict=True)
                    },
                    "left_out": missing,
                    "score_of_adamw": round(found["adamw"], 4),
                },
            )
        )
    return rows


def fastest(work: Workload, method: Method, target: float, count: int, trials: Trials) -> dict[str, Any]:
    """Return the seconds of the fastest trial, and its place in the search space."""
    found = []
    for index in range(count):
        horizon = 1 / 3 + 2 / 3 * drawn(index, 3)
        seen = _trial(work, method, index, horizon=horizon, seed=0, trials=trials)
        found.append(
            (time_to(target, [(s, loss) for s, loss in seen]), index, horizon, min((b for _, b in seen), default=None))
        )
    seconds, index, horizon, _ = min(found, key=lambda one: one[0])
    return {
        "seconds": seconds,
        "rate": rate_of(method, index),
        "horizon": round(horizon, 3),
        "reached": sum(math.isfinite(one[0]) for one in found),
        "least_losses": [None if one[3] is None else round(one[3], 4) for one in found],
    }


def rate_of(method: Method, index: int) -> float:
    """Return the rate of a trial: quasi-random in its logarithm, over a factor of 32."""
    return method.middle * 32 ** (drawn(index, 2) - 0.5)


def _trial(work: Workload, method: Method, index: int, *, horizon: float, seed: int, trials: Trials) -> Any:
    rate = rate_of(method, index)
    key = f"{work.name}, {method.name}, rate {rate:.4g}, {horizon:.3g} of {work.steps} steps, seed {seed}"
    return trials(
        key, lambda: followed(work, method.written(rate), horizon=horizon, seed=seed, evaluations=EVALUATIONS)
    )
