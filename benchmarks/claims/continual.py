"""Continual learning with frozen values (Cha and Cho, arXiv:2403.09066): tuned on one sequence of tasks, reported on
another.

A byte model learns packages of the standard library one after the other. Plain training is compared with a pull towards
the weights at the end of the task before (lambda/2 |w - w_before|^2), each with one value: the rate of plain training,
and lambda. Both are tuned on one sequence of packages and reported on another, with other seeds. The paper says that
methods fall in rank so; it has no figure for this pair.
"""

from __future__ import annotations

import hashlib
import json
import time
from functools import cache, partial
from itertools import chain
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor

from claims import Row, Study
from claims._frozen import Family, Frozen
from claims._lm import Lm, Shape, loss_of
from claims._trials import Trials
from gossamer import optimizer as optimizer_methods

SHAPE = Shape(width=32, layers=1, context=64)
RATE, ROWS = 4e-3, 32
SEQUENCES = {"email, xml, asyncio": ("email", "xml", "asyncio"), "http, json, unittest": ("http", "json", "unittest")}
HELD = 8  # one part of so many is for validation


def studies(*, quick: bool) -> list[Study]:
    return [Study("anchor", partial(anchor, 10 if quick else 200, 1 if quick else 3))]


def anchor(steps: int, seeds: int, trials: Trials) -> list[Row]:
    tuning, reporting = (
        Family(data=name, seeds=tuple(range(at * 100, at * 100 + seeds)), digest=digest(name))
        for at, name in enumerate(SEQUENCES)
    )
    protocol = Frozen(tuned_on=tuning, reported_on=reporting)
    sides = {
        "plain": lambda rate, data, seed: learned(steps, 0.0, data, seed, rate=rate),
        "anchored": lambda pull, data, seed: learned(steps, pull, data, seed),
    }
    found = protocol(sides, {"plain": RATE, "anchored": 1e-2}, trials, factor=4.0)
    pairs = [a / b for a, b in zip(found["anchored"].losses, found["plain"].losses, strict=True)]
    return [
        Row(
            method="anchored",
            claim="mean loss over all tasks after the last; holds: below 1 with every seed",
            baseline="plain",
            ratio=round(mean(pairs), 5),
            paper_ratio=None,
            spread=(round(min(pairs), 5), round(max(pairs), 5)),
            seeds=seeds,
            setting=f"byte LM of 1 layer of 32; tasks of {steps} steps of {ROWS * SHAPE.context:,} bytes",
            holds=max(pairs) < 1,
            details=protocol.told() | {name: one.told() for name, one in found.items()},
        )
    ]


@cache
def tasks(name: str) -> tuple[Tensor, ...]:
    """Return the bytes of each package of a sequence."""
    root = Path(json.__file__).parents[1]
    folders = (sorted((root / package).rglob("*.py")) for package in SEQUENCES[name])
    texts = (b"\n".join(file.read_bytes() for file in files if "test" not in file.parts) for files in folders)
    return tuple(torch.frombuffer(bytearray(one), dtype=torch.uint8).long() for one in texts)


def digest(name: str) -> str:
    return hashlib.sha256(bytes(chain.from_iterable(task.tolist() for task in tasks(name)))).hexdigest()[:16]


def learned(steps: int, pull: float, data: str, seed: int, *, rate: float = RATE) -> dict[str, float]:
    """Learn the tasks one after the other; return the mean loss over all of them at the end, seconds and parameters."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model, began = Lm(SHAPE), time.process_time()
    params = dict(model.named_parameters())
    rule = optimizer_methods.build({"adamw": {"lr": rate}})
    drawn = torch.Generator().manual_seed(seed)
    before: dict[str, Tensor] = {}
    for task in tasks(data):
        state = rule.init(params)
        kept = len(task) - len(task) // HELD
        for step in range(steps):
            starts = torch.randint(0, kept - SHAPE.context - 1, (ROWS,), generator=drawn)
            loss = loss_of(model, task[starts[:, None] + torch.arange(SHAPE.context + 1)])
            grads = dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))
            for name, start in before.items():
                grads[name] = grads[name] + pull * (params[name].detach() - start)
            rule.update(params, grads, state, lr_scale=min(1.0, (step + 1) / 10), step=step)
        before = {name: param.detach().clone() for name, param in params.items()}
    seconds = time.process_time() - began
    return {
        "loss": mean(_held(model, task) for task in tasks(data)),
        "seconds": round(seconds, 2),
        "parameters": sum(p.numel() for p in params.values()),
    }


@torch.no_grad()
def _held(model: Lm, task: Tensor) -> float:
    """Return the loss of the part of a task that is not trained on."""
    held = task[len(task) - len(task) // HELD :]
    starts = torch.linspace(0, len(held) - SHAPE.context - 1, 128).long()
    return float(loss_of(model, held[starts[:, None] + torch.arange(SHAPE.context + 1)]))
