"""Distiller's MI-alpha (Zhang et al., SustaiNLP 2021, arXiv:2109.11105) as the match of hidden states beside KL, and
mean squared error in its place, and none.

The models are those of taid.py: a byte LM of 4 layers teaches one of 1 layer; the last blocks are matched. The rate is
tuned with KL alone, then each match gets as many weights, and then as many rates at its best weight, with seed 0. The
paper gives scores of tasks, not of losses: `paper_ratio` is null. Losses are of the labels on held-out text.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from claims import Row, Study
from claims._grid import tuned
from claims._lm import Lm, text, validation_loss
from claims._trials import Trials
from gossamer.loss import hidden_match
from gossamer.loss.kl import forward_kl
from gossamer.run.hidden_states import BlockTaps, HiddenMaps, HiddenTerm, TappedStates, attach, blocks_of
from grow_shrink.taid import SEEDS, STEPS, STUDENT, TEACHER, TEACHER_STEPS, TOKENS, beside, taught, train

METHODS = ("mi_alpha", "mse")
NONE = "none"


def studies(*, quick: bool) -> list[Study]:
    return [Study("loss", partial(loss, 8 if quick else STEPS, 10 if quick else TEACHER_STEPS, 2 if quick else SEEDS))]


def loss(steps: int, teacher_steps: int, seeds: int, trials: Trials) -> list[Row]:
    size = f"{steps} steps of {TOKENS}, teacher of {teacher_steps}"

    def run(name: str, rate: float, weight: float, seed: int = 0) -> dict[str, Any]:
        return trials(
            f"{name}, rate {rate:.3g}, weight {weight:.3g}, seed {seed}, {size}",
            partial(distilled, name, rate, weight, seed, steps, teacher_steps),
        )

    plain = tuned({NONE: lambda rate: run(NONE, rate, 0.0)["loss"]}, {NONE: 8e-3}, factor=2.0, least=3, most=5)[NONE]
    weights = tuned({m: _by_weight(run, m, plain.best) for m in METHODS}, dict.fromkeys(METHODS, 0.1), factor=4.0)
    rates = tuned(
        {m: _by_rate(run, m, weights[m].best) for m in METHODS}, dict.fromkeys(METHODS, plain.best), factor=2.0
    )
    chosen = {NONE: (plain.best, 0.0), **{m: (rates[m].best, weights[m].best) for m in METHODS}}
    found = {name: [run(name, *at, seed) for seed in range(seeds)] for name, at in chosen.items()}
    losses = {name: [one["loss"] for one in each] for name, each in found.items()}
    return [
        beside(
            method,
            other,
            losses,
            claim=f"loss of the labels at equal steps beside KL, of that with {other}; holds: below 1 with every seed",
            size=size,
            details={
                "teacher": found[method][0]["teacher"],
                "seconds": {name: [one["seconds"] for one in found[name]] for name in (method, other)},
                "weights": {name: weights[name].told() for name in (method, other) if name in weights},
                "rates": {name: (rates.get(name) or plain).told() for name in (method, other)},
            },
        )
        for method, other in (("mi_alpha", "mse"), ("mi_alpha", NONE), ("mse", NONE))
    ]


def _by_weight(run: Callable[..., dict[str, Any]], name: str, rate: float) -> Callable[[float], float]:
    return lambda weight: float(run(name, rate, weight)["loss"])


def _by_rate(run: Callable[..., dict[str, Any]], name: str, weight: float) -> Callable[[float], float]:
    return lambda rate: float(run(name, rate, weight)["loss"])


def distilled(name: str, rate: float, weight: float, seed: int, steps: int, teacher_steps: int) -> dict[str, Any]:
    """Train a student with KL and a match of the last blocks; return its loss on held-out text, that of its teacher,
    and the seconds.
    """
    torch.set_num_threads(1)
    text()
    teacher, its_loss = taught(teacher_steps)
    torch.manual_seed(seed)
    student = Lm(STUDENT)
    term = None if name == NONE else matched(student, teacher, name, weight, seed)

    def objective(rows: Tensor, t: float) -> Tensor:
        logits = student(rows[:, :-1]).flatten(0, 1)
        with torch.no_grad():
            wanted = teacher(rows[:, :-1]).flatten(0, 1)
        value = forward_kl(wanted, logits).mean()
        return value if term is None else value + term.loss({"labels": rows[:, :-1]})

    began = time.process_time()
    train(student, objective, rate, seed, steps)
    seconds = time.process_time() - began
    if term is not None:
        term.student.remove()
        term.teacher.remove()
    return {"loss": validation_loss(student, STUDENT.context), "teacher": its_loss, "seconds": round(seconds, 2)}


def matched(student: Lm, teacher: Lm, name: str, weight: float, seed: int) -> HiddenTerm:
    """Return the match of the last blocks, with its maps among the student's parameters."""
    match = hidden_match.build(name)
    pair = (blocks_of(student, "the student")[-1], blocks_of(teacher, "the teacher")[-1])
    maps = HiddenMaps([match.shapes(STUDENT.width, TEACHER.width)], next(student.parameters()), seed)
    attach(student, maps)
    return HiddenTerm(
        by=match,
        weight=weight,
        pairs=[(*pair, 0)],
        maps=maps,
        student=BlockTaps.on("of the student", student, [pair[0]]),
        teacher=TappedStates(BlockTaps.on("of the teacher", teacher, [pair[1]])),
    )
