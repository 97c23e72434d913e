"""ConAdv (Liu et al., ICLR 2022, arXiv:2106.00221): adversarial examples raise the accuracy of large batches, and a
perturbation that others compute with the weights of the step before costs no time.

The paper's setting (ResNet-50, ImageNet, batch 96K) is out of reach here; the digits at batch 1024 stand for it, so the
accuracy row has no figure of the paper's. The time rows are one rank and its companion process beside the same in one
process, and beside what the claim comes to: a step whose loss has as many rows, and for which nobody computes a
perturbation. They are wall seconds of steps, one thread per process, runs in turns: measure on a machine at rest with
two free cores.
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import gossamer
from claims import Row, Study
from claims._digits_cnn import Cnn, Rows, parts
from claims._grid import tuned
from claims._pairs import spread
from claims._trials import Trials
from gossamer.spec import records

BATCH, EPSILON, SEEDS, STEPS, WIDTH = 1024, 0.05, 3, 60, 16
START, TRIALS_LEAST, TRIALS_MOST = 3.0, 3, 5
QUIET = 0.2  # cores that other programs may take while steps are timed
WIDE, TIMED, SKIPPED = 32, 12, 4  # the first steps start the companion, and are computed twice to check it
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"batch": BATCH},
    "plain, twice the rows": {"batch": 2 * BATCH},
    "one process": {"batch": BATCH, "adversarial": {"epsilon": EPSILON, "delay": 1}},
    "companion": {"batch": BATCH, "adversarial": {"epsilon": EPSILON, "delay": 1, "ahead": True}},
}


def studies(*, quick: bool) -> list[Study]:
    return [
        Study("accuracy", partial(accuracy, 10 if quick else STEPS, 2 if quick else SEEDS)),
        Study("time", partial(seconds, 1 if quick else 3)),
    ]


def accuracy(steps: int, seeds: int, trials: Trials) -> list[Row]:
    sides = {"plain": {}, "conadv": {"epsilon": EPSILON, "delay": 1}}

    def run(side: str, rate: float, seed: int) -> dict[str, float]:
        key = f"{side}, {steps} steps, rate {rate:.4g}, seed {seed}"
        return trials(key, lambda: trained(sides[side], rate, seed, steps))

    grids = tuned(
        {side: lambda rate, side=side: run(side, rate, 0)["validation_loss"] for side in sides},
        dict.fromkeys(sides, START),
        factor=3.0,
        least=TRIALS_LEAST,
        most=TRIALS_MOST,
    )
    found = {side: [run(side, grid.best, seed) for seed in range(seeds)] for side, grid in grids.items()}
    test = {side: [one["test_accuracy"] for one in each] for side, each in found.items()}
    each = [a / b for a, b in zip(test["conadv"], test["plain"], strict=True)]
    row = Row(
        method="conadv",
        claim="test accuracy at a large batch; holds: above 1 with every seed",
        baseline="the same optimizer on the batch alone",
        ratio=round(mean(each), 5),
        paper_ratio=None,
        spread=spread(each),
        seeds=seeds,
        setting=f"digits of scikit-learn, batch {BATCH} of {len(Rows())}, {steps} steps of lars, two convolutions of "
        f"{WIDTH} and {2 * WIDTH} channels, epsilon {EPSILON}; rates tuned on the validation loss of seed 0",
        holds=min(each) > 1,
        details={side: {"test_accuracy": test[side], "rates": grids[side].told()} for side in sides},
    )
    losses = {side: [one["test_loss"] for one in each] for side, each in found.items()}
    below = [a / b for a, b in zip(losses["conadv"], losses["plain"], strict=True)]
    return [
        row,
        replace(
            row,
            claim="test loss at a large batch; holds: below 1 with every seed",
            ratio=round(mean(below), 5),
            spread=spread(below),
            holds=max(below) < 1,
            details=losses,
        ),
    ]


def seconds(turns: int, trials: Trials) -> list[Row]:
    found: dict[str, list[float]] = {name: [] for name in VARIANTS}
    others: list[float] = []
    for turn in range(turns):
        for name in list(VARIANTS)[:: 1 if turn % 2 else -1]:
            one = trials(f"{name}, turn {turn}", partial(timed, VARIANTS[name]))
            found[name].append(one["step_s"])
            others.append(one["others"])
    at_rest = max(others) < QUIET
    middle = {name: round(median(each), 4) for name, each in found.items()}
    rows = []
    for baseline, predicted, most in (
        ("plain, twice the rows", 1.0, 1.15),
        ("one process", 2 / 3, 0.8),
        ("plain", 2.0, 2.3),
    ):
        each = [a / b for a, b in zip(found["companion"], found[baseline], strict=True)]
        rows.append(
            Row(
                method="conadv",
                claim="seconds of a step with a companion process; predicted: as many as its own forwards and "
                f"backwards; holds: {most:g} at most, where no other program takes more than {QUIET:g} of a core",
                baseline=baseline,
                ratio=round(median(each), 4),
                paper_ratio=None,
                spread=spread(each),
                seeds=turns,
                setting=f"batch {BATCH} of digits, two convolutions of {WIDE} and {2 * WIDE} channels, one thread per "
                f"process, median of {TIMED - SKIPPED} steps",
                holds=median(each) <= most if at_rest else None,
                details={
                    "predicted_ratio": round(predicted, 3),
                    "step_s": middle,
                    "cores_taken_by_other_programs": [round(min(others), 2), round(max(others), 2)],
                },
            )
        )
    return rows


def trained(adversarial: dict[str, Any], rate: float, seed: int, steps: int) -> dict[str, float]:
    """Train from the weights of a seed on the order of a seed; return losses and accuracy of the parts."""
    torch.manual_seed(seed)
    model = Cnn(WIDTH)
    train = {
        "steps": steps,
        "batch": BATCH,
        "seed": seed,
        "optimizer": {"lars": {"lr": rate}},
        "adversarial": adversarial,
    }
    _run(model, Rows(), train)
    model.eval()
    found = {}
    with torch.no_grad():
        for name, (images, labels) in parts().items():
            logits = model(images)
            found[f"{name}_loss"] = float(cross_entropy(logits, labels))
            found[f"{name}_accuracy"] = float((logits.argmax(1) == labels).float().mean())
    return found


def timed(train: dict[str, Any]) -> dict[str, float]:
    """Return the median seconds of a step, and how many cores other programs took meanwhile."""
    model = {"factory": "claims._digits_cnn:net", "config": {"width": WIDE}}
    began, busy, own = time.perf_counter(), _busy_s(), _own_s()
    found = _run(model, Rows(copies=2), {"steps": TIMED, "optimizer": {"sgd": {"lr": 0.05}}, **train})
    wall, busy, own = time.perf_counter() - began, _busy_s() - busy, _own_s() - own
    return {"step_s": median(one.step_s for one in found if one.step > SKIPPED), "others": (busy - own) / wall}


def _busy_s() -> float:
    """Return the seconds that all processors have worked since the machine was started; Linux."""
    user, nice, system, _, _, *interrupts = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:8])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    """Return the seconds that processors have worked for this process and its children that have ended."""
    found = os.times()
    return found.user + found.system + found.children_user + found.children_system


def _run(model: Any, data: Rows, train: dict[str, Any]) -> list[records.Step]:
    with tempfile.TemporaryDirectory() as folder:
        steps: list[records.Step] = []
        settings = {
            "train": {
                "accumulate": 1,
                "loss": "classification",
                "max_grad_norm": 0.0,
                "evaluate_every": 0,
                "checkpoint_every": 0,
                "prove": "never",
                **train,
            },
            "machines": {"threads": 1},
            "run": {"directory": folder, "name": "a", "display": "quiet"},
        }
        note = [lambda record: steps.append(record) if isinstance(record, records.Step) else None]
        gossamer.train(model, data, settings, callbacks=note)
        return steps
