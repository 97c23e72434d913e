"""Eva (Zhang, Shi, Li, ICLR 2023, arXiv:2308.02123): steps and seconds to a loss that SGD with momentum ends at.

The paper's figures are of image models and autoencoders on 32 GPUs: up to 2.05 times as fast as SGD and 2.42 times as
fast as K-FAC and Shampoo. Here it is digits on one core. Every side has five forms (momentum, betas, damping and clip,
or kind of Shampoo) and tunes the rate of each on a bracketed grid, all with the same number of trials, by the loss at
the end. The target is the worst loss over seeds that the best of SGD ends at; of its trials, a side then takes the one
that is there in the fewest steps with seed 0. The rate falls to nothing over the budget. Seconds are steps times the
processor's seconds of a step, measured in turns.

Shampoo is that of the package pytorch-optimizer; where that is missing, its rows are left out.

Predicted before any loss was measured, from the sizes of a and b alone: |a|^2 |b|^2 is far below the damping for all
but the first steps, and zero where a batch normalization follows (the gradients before it sum to zero), so that Eva is
SGD under a clip there: 0.8 to 1.25 times the speed in steps on `convolutions` and `normalized`, 1 to 1.5 on the
autoencoder; Eva-f, which has no b, 1.2 to 2; Eva-s, whose vectors are means of gradients, 0.8 to 1.25. In seconds half
of that, as steps of 1 ms pay for hooks. AdamW and Shampoo are ahead in steps on the autoencoder (0.5), and Shampoo's
steps take several times as long.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import mean, median
from typing import Any

from torch import nn

from claims import Row, Study
from claims._grid import tuned
from claims._images import AUTOENCODER, CONVOLUTIONS, NORMALIZED, Images, Trained, followed, seconds_of_steps, steps_to
from claims._trials import Trials
from gossamer import optimizer as optimizer_methods

SEEDS, EVALUATIONS, LEAST, MOST, FACTOR, TURNS = 3, 40, 3, 6, 3.0, 7
PACKAGE, REFRESH = "pytorch_optimizer", 10
GRAFTS = {"sgd": 1, "adagrad": 2, "rmsprop": 3}
PAPER = {"sgd": 2.05, "shampoo": 2.42}
BASELINES, CLAIMED = ("sgd", "adamw", "shampoo"), ("eva", "eva_f", "eva_s")
Form = Callable[[float], Callable[[nn.Module], Trained]]  # given a rate


@dataclass(frozen=True, slots=True)
class Start:
    """Rates that the grids begin at: of plain gradients, and of Adam's steps."""

    gradient: float
    adam: float


STARTS = {"autoencoder": Start(0.01, 0.006), "convolutions": Start(0.1, 0.003), "normalized": Start(0.1, 0.003)}


def studies(*, quick: bool) -> list[Study]:
    tasks = [(task, 40 if quick else task.steps) for task in (AUTOENCODER, CONVOLUTIONS, NORMALIZED)]
    seeds, most = (1, LEAST) if quick else (SEEDS, MOST)
    return [Study(task.name, partial(speed, task, steps, seeds, most)) for task, steps in tasks]


def forms(start: Start) -> dict[str, dict[str, tuple[Form, float]]]:
    """Return the forms of every side by name, each with the rate to start at."""

    def ours(written: Callable[[float], Mapping[str, Any]]) -> Form:
        return lambda rate: partial(_built, dict(written(rate)))

    def sgd(momentum: float, nesterov: bool) -> tuple[Form, float]:
        given = {"momentum": momentum, "nesterov": nesterov}
        return ours(lambda rate: {"sgd": {"lr": rate, **given}}), start.gradient * 10 * (1 - momentum)

    def adamw(*betas: float) -> tuple[Form, float]:
        given = {"betas": list(betas), "weight_decay": 0.0}
        return ours(lambda rate: {"adamw": {"lr": rate, **given}}), start.adam

    def eva(name: str, damping: float, kl_clip: float) -> tuple[Form, float]:
        given = {"damping": damping, "kl_clip": kl_clip, "plain": []}
        first = start.gradient if kl_clip == 0 else start.gradient * 10 * damping
        return ours(lambda rate: {name: {"lr": rate, **given}}), first

    found = {
        "sgd": {
            "momentum 0.8": sgd(0.8, False),
            "momentum 0.9": sgd(0.9, False),
            "momentum 0.97": sgd(0.97, False),
            "nesterov 0.9": sgd(0.9, True),
            "nesterov 0.97": sgd(0.97, True),
        },
        "adamw": {f"betas {b1:g}, {b2:g}": adamw(b1, b2) for b1, b2 in _BETAS},
    }
    for name in CLAIMED:
        found[name] = {f"damping {d:g}, clip {clip:g}": eva(name, d, clip) for d, clip in _CURVATURE}
    if importlib.util.find_spec(PACKAGE):  # a package of its own, which nothing else here needs
        found["shampoo"] = {
            "plain, from 1e-6": (_shampoo("Shampoo", matrix_eps=1e-6), start.gradient * 10),
            "plain, from 1e-2": (_shampoo("Shampoo", matrix_eps=1e-2), start.gradient * 10),
            **{
                f"scalable, as long as {name}": (_scalable(graft), start.gradient if name == "sgd" else start.adam)
                for name, graft in GRAFTS.items()
            },
        }
    return found


_BETAS = ((0.9, 0.9), (0.9, 0.95), (0.9, 0.99), (0.9, 0.999), (0.95, 0.999))
_CURVATURE = ((0.03, 1e-3), (1e-3, 0.0), (0.03, 0.0), (1.0, 0.0), (30.0, 0.0))  # the first as in the paper


@dataclass(frozen=True, slots=True)
class Side:
    """What one side found. `steps`: to the target, by seed; infinite where it was missed."""

    form: str
    rate: float
    steps: list[float]
    losses: list[float]
    step_s: float
    at_border: bool
    trials: int

    def told(self) -> dict[str, Any]:
        return {
            "form": self.form,
            "rate": self.rate,
            "steps": [None if math.isinf(one) else one for one in self.steps],
            "loss_at_end": [round(one, 5) if math.isfinite(one) else None for one in self.losses],
            "step_s": round(self.step_s, 6),
            "trials": self.trials,
            "at_border": self.at_border,
        }


def speed(task: Images, steps: int, seeds: int, most: int, trials: Trials) -> list[Row]:
    sides = forms(STARTS[task.name])

    def run(side: str, form: str, rate: float, seed: int) -> list[list[float]]:
        made = sides[side][form][0](rate)
        key = f"{side}, {form}, {steps} steps, rate {rate:.4g}, seed {seed}"
        return trials(key, lambda: followed(task, made, seed=seed, evaluations=EVALUATIONS, steps=steps))

    pairs = [(side, form) for side, each in sides.items() for form in each]
    grids = tuned(
        {_key(*pair): lambda rate, pair=pair: _end(run(*pair, rate, 0), steps) for pair in pairs},
        {_key(side, form): sides[side][form][1] for side, form in pairs},
        factor=FACTOR,
        least=LEAST,
        most=most,
    )
    best = min(sides["sgd"], key=lambda form: grids[_key("sgd", form)].loss)
    ends = [_end(run("sgd", best, grids[_key("sgd", best)].best, seed), steps) for seed in range(seeds)]
    target = max(ends)
    tried = {side: [(form, r) for form in sides[side] for r in grids[_key(side, form)].tried] for side in sides}
    seen = {side: {one: run(side, *one, 0) for one in each} for side, each in tried.items()}
    picked = {
        side: min(each, key=lambda one: (steps_to(target, seen[side][one]), _end(seen[side][one], steps)))
        for side, each in tried.items()
    }
    made = {side: sides[side][form][0](rate) for side, (form, rate) in picked.items()}
    key = f"seconds of a step: {'; '.join(f'{side}, {form}' for side, (form, _) in picked.items())}"
    step_s = trials(key, lambda: seconds_of_steps(task, made, turns=TURNS))
    found = {}
    for side, (form, rate) in picked.items():
        runs = [run(side, form, rate, seed) for seed in range(seeds)]
        found[side] = Side(
            form,
            rate,
            [steps_to(target, one) for one in runs],
            [_end(one, steps) for one in runs],
            median(step_s[side]),
            not grids[_key(side, form)].is_bracketed,
            len(tried[side]),
        )
    return _rows(task, steps, target, found)


def _rows(task: Images, steps: int, target: float, found: Mapping[str, Side]) -> list[Row]:
    missing = {} if "shampoo" in found else {"left_out": f"shampoo: no package {PACKAGE}"}
    rows = []
    for name in CLAIMED:
        for other in (one for one in BASELINES if one in found):
            one, base = found[name], found[other]
            each = [_times(a, b, steps) for a, b in zip(one.steps, base.steps, strict=True)]
            cost = base.step_s / one.step_s
            for unit, factor in (("steps", 1.0), ("seconds", cost)):
                ratios = [ratio * factor for ratio in each]
                rows.append(
                    Row(
                        method=name,
                        claim=f"{unit} to the loss that sgd with momentum ends at, of the baseline's / its own; 0: it "
                        "never was there; holds: above 1 with every seed",
                        baseline=other,
                        ratio=round(mean(ratios), 4),
                        paper_ratio=PAPER.get(other) if name == "eva" and unit == "seconds" else None,
                        spread=(round(min(ratios), 4), round(max(ratios), 4)),
                        seeds=len(ratios),
                        setting=f"{task.name} of digits, batch {task.batch}, {steps} steps, loss {target:.4g} of the "
                        f"{task.judged} part; one core",
                        holds=min(ratios) > 1,
                        details={name: one.told(), other: base.told(), **missing},
                    )
                )
    return rows


def _times(ours: float, theirs: float, steps: int) -> float:
    """Return how many times as fast ours is; where theirs was never there, at least so many times."""
    return 0.0 if math.isinf(ours) else min(theirs, steps) / ours


def _end(evaluations: list[list[float]], steps: int) -> float:
    """Return the loss at the end; infinite for a run that did not get there."""
    is_whole = bool(evaluations) and evaluations[-1][0] == steps and math.isfinite(evaluations[-1][1])
    return evaluations[-1][1] if is_whole else math.inf


def _key(side: str, form: str) -> str:
    return f"{side}, {form}"


def _built(written: dict[str, Any], model: nn.Module) -> Trained:
    return Trained(model, rule=optimizer_methods.build(written))


def _shampoo(name: str, **given: Any) -> Form:
    """Return a kind of Shampoo with its roots every REFRESH steps."""

    def built(rate: float, model: nn.Module) -> Trained:
        found = getattr(importlib.import_module(PACKAGE), name)
        given_all = {"lr": rate, "preconditioning_compute_steps": REFRESH, **given}
        return Trained(model, theirs=found(model.parameters(), **given_all))

    return lambda rate: partial(built, rate)


def _scalable(graft: int) -> Form:
    """Return Shampoo with the length of another rule's steps (Anil et al., arXiv:2002.09018)."""
    return _shampoo("ScalableShampoo", graft_type=graft, start_preconditioning_step=REFRESH)
