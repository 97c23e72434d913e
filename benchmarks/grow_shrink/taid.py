"""TAID (Shing et al., ICLR 2025, arXiv:2501.16937) beside KL, reverse KL, JSD and the labels alone, at equal steps.

A byte LM of 4 layers teaches one of 1 layer. The paper gives scores of tasks, not of losses: `paper_ratio` is null.
Every method gets the same number of rates on a bracketed grid with seed 0; losses are of the labels on held-out text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import cache, partial
from statistics import mean
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from claims import Row, Study
from claims._grid import tuned
from claims._lm import VALIDATION, Lm, Shape, batches, loss_of, rate_at, text, validation_loss
from claims._pairs import spread
from claims._trials import Trials
from gossamer import loss as loss_methods
from gossamer import optimizer as optimizer_methods
from gossamer.loss.distillation import Distillation

TEACHER, STUDENT = Shape(width=96, layers=4, context=64), Shape(width=48, layers=1, context=64)
RATE = 4e-3  # of the teacher
TOKENS, STEPS, TEACHER_STEPS, SEEDS = 1024, 150, 400, 3
METHODS = ("taid", "kl", "reverse_kl", "jsd", "labels")


def studies(*, quick: bool) -> list[Study]:
    return [Study("loss", partial(loss, 8 if quick else STEPS, 10 if quick else TEACHER_STEPS, 2 if quick else SEEDS))]


def loss(steps: int, teacher_steps: int, seeds: int, trials: Trials) -> list[Row]:
    size = f"{steps} steps of {TOKENS}, teacher of {teacher_steps}"

    def run(name: str, rate: float, seed: int = 0) -> dict[str, Any]:
        return trials(
            f"{name}, rate {rate:.3g}, seed {seed}, {size}", partial(distilled, name, rate, seed, steps, teacher_steps)
        )

    def tried(name: str) -> Callable[[float], float]:
        return lambda rate: run(name, rate)["loss"]

    grids = tuned({m: tried(m) for m in METHODS}, dict.fromkeys(METHODS, 8e-3), factor=2.0, least=3, most=5)
    losses = {m: [run(m, grids[m].best, seed)["loss"] for seed in range(seeds)] for m in METHODS}
    teacher = run("taid", grids["taid"].best)["teacher"]
    return [
        beside(
            "taid",
            other,
            losses,
            claim=f"loss of the labels at equal steps, of {other}'s; holds: below 1 with every seed",
            size=size,
            details={"teacher": teacher, "rates": {name: grids[name].told() for name in ("taid", other)}},
        )
        for other in METHODS[1:]
    ]


def beside(
    method: str, other: str, losses: Mapping[str, list[float]], *, claim: str, size: str, details: Mapping[str, Any]
) -> Row:
    """Return the row of a method's losses by seed in units of another one's."""
    each = [a / b for a, b in zip(losses[method], losses[other], strict=True)]
    return Row(
        method=method,
        claim=claim,
        baseline=other,
        ratio=round(mean(each), 5),
        paper_ratio=None,
        spread=spread(each),
        seeds=len(each),
        setting=f"byte LMs, 4 layers of {TEACHER.width} teach 1 of {STUDENT.width}; {size} tokens; loss of "
        f"{VALIDATION} sequences of {STUDENT.context} bytes; seed 0 tuned all",
        holds=max(each) < 1,
        details={**details, "losses": {name: losses[name] for name in (method, other)}},
    )


@cache
def taught(steps: int) -> tuple[Lm, float]:
    """Return the teacher, trained on the labels, and its loss."""
    torch.manual_seed(99)
    model = Lm(TEACHER)
    train(model, lambda rows, t: loss_of(model, rows), RATE, 99, steps)
    return model.eval().requires_grad_(False), validation_loss(model, TEACHER.context)


def distilled(name: str, rate: float, seed: int, steps: int, teacher_steps: int) -> dict[str, Any]:
    """Train a student by a method; return its loss on held-out text, that of its teacher, and the seconds."""
    torch.set_num_threads(1)
    text()
    teacher, its_loss = taught(teacher_steps)
    torch.manual_seed(seed)
    student = Lm(STUDENT)
    method = None if name == "labels" else loss_methods.build(name)

    def objective(rows: Tensor, t: float) -> Tensor:
        logits = student(rows[:, :-1]).flatten(0, 1)
        if method is None:
            return cross_entropy(logits, rows[:, 1:].flatten())
        with torch.no_grad():
            wanted = teacher(rows[:, :-1]).flatten(0, 1)
        assert isinstance(method, Distillation)
        return method.divergence(logits, wanted, t).mean()

    began = time.process_time()
    train(student, objective, rate, seed, steps, method)
    seconds = time.process_time() - began
    return {
        "loss": validation_loss(student, STUDENT.context),
        "teacher": its_loss,
        "seconds": round(seconds, 2),
    }


def train(
    model: Lm,
    objective: Callable[[Tensor, float], Tensor],
    rate: float,
    seed: int,
    steps: int,
    method: Any = None,
) -> None:
    rule = optimizer_methods.build({"adamw": {"lr": rate}})
    params = dict(model.named_parameters())
    held = {name: p.detach() for name, p in params.items()}
    state = rule.init(held)
    course = None if method is None else method.first()
    context = model.shape.context
    for step, rows in enumerate(batches(seed, TOKENS // context, context, steps)):
        value = objective(rows, 1.0 if course is None else course.t)
        found = torch.autograd.grad(value, list(params.values()))
        norm = float(torch.stack([one.square().sum() for one in found]).sum().sqrt())
        grads = {n: g / max(1.0, norm) for n, g in zip(params, found, strict=True)}
        rule.update(held, grads, state, lr_scale=rate_at(step, steps), step=step)
        if course is not None:
            course = method.after(course, loss=float(value.detach()), done=step + 1, total=steps)
