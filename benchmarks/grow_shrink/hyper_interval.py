"""HyperInterval (Krukowski et al., arXiv:2405.15444): digits two classes at a time, one embedding for all tasks.

The target is a network of one hidden layer; the baselines are the same network trained on, and a linear head, both by
plain SGD. Every side has one value, tuned on one half of the digits and reported on the other, with other orders of the
classes: the rate of the baselines, and beta, the weight of the old tasks, of HyperInterval.
"""

from __future__ import annotations

import time
from functools import partial
from statistics import mean
from typing import Any

import torch
from torch import nn

from claims import Row, Study
from claims._frozen import Family, Frozen
from claims._trials import Trials
from gossamer.model.networks.hyper_interval import HyperInterval
from gossamer.ops.intervals import Interval, worst_logits
from grow_shrink._digits import CLASSES, HALVES, PIXELS, digest, digits, error, turns
from grow_shrink.key_value import EPOCHS, ROWS, descend, tested

HIDDEN, SIZE, STEPS, RATE, KAPPA, WORST = 32, 2, 200, 3e-3, 2.0, 0.3


def studies(*, quick: bool) -> list[Study]:
    return [Study("digits", partial(in_turn, 1 if quick else 3, 40 if quick else STEPS))]


def in_turn(seeds: int, steps: int, trials: Trials) -> list[Row]:
    tuning, reporting = (
        Family(data=name, seeds=tuple(range(100 * at, 100 * at + seeds)), digest=digest(name))
        for at, name in enumerate(HALVES)
    )
    protocol = Frozen(tuned_on=tuning, reported_on=reporting)
    sides = {
        "linear head": partial(trained_on, False),
        "network": partial(trained_on, True),
        "hyper_interval": partial(learned, steps),
    }
    starts = {"linear head": 0.03, "network": 0.03, "hyper_interval": 0.1}
    found = protocol(sides, starts, trials, factor=10.0, most=5)
    details = protocol.told() | {name: one.told() for name, one in found.items()}
    rows = []
    for baseline in ("linear head", "network"):
        pairs = [a / b for a, b in zip(found["hyper_interval"].losses, found[baseline].losses, strict=True)]
        rows.append(
            Row(
                method="hyper_interval",
                claim="error over all classes after the last, one embedding for all; holds: below with every order",
                baseline=f"{baseline}, trained on",
                ratio=round(mean(pairs), 4),
                paper_ratio=None,
                spread=(round(min(pairs), 4), round(max(pairs), 4)),
                seeds=seeds,
                setting=f"8 x 8 digits of one half, 2 classes at a time; {steps} steps a task; target 64-{HIDDEN}-10",
                holds=max(pairs) < 1,
                details=details,
            )
        )
    pairs = [
        a["known_task"] / max(b["known_task"], 1 / 224)  # one image of the test part
        for a, b in zip(found["hyper_interval"].runs, found["network"].runs, strict=True)
    ]
    rows.append(
        Row(
            method="hyper_interval",
            claim="error where the task of an image is known, at the task's embedding; holds: below with every order",
            baseline="network, trained on, among the task's classes",
            ratio=round(mean(pairs), 4),
            paper_ratio=None,
            spread=(round(min(pairs), 4), round(max(pairs), 4)),
            seeds=seeds,
            setting=rows[0].setting + "; values tuned for the error over all classes",
            holds=max(pairs) < 1,
            details=protocol.told(),
        )
    )
    return rows


def trained_on(hidden: bool, rate: float, data: str, seed: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    began = time.process_time()
    layers = [nn.Linear(PIXELS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)]
    module = nn.Sequential(*layers) if hidden else nn.Linear(PIXELS, CLASSES)
    for classes in turns(seed, SIZE):
        descend(module, *digits(data).of(classes), rate=rate, seed=seed)
    half = digits(data)
    with torch.no_grad():
        known = [
            error(module(half.test_inputs[rows])[:, classes], _place(half.test_labels[rows], classes))
            for classes in turns(seed, SIZE)
            for rows in [torch.isin(half.test_labels, torch.tensor(classes))]
        ]
    return {
        "loss": tested(module, data),
        "known_task": mean(known),
        "seconds": round(time.process_time() - began, 2),
        "parameters": sum(p.numel() for p in module.parameters()),
        "epochs": EPOCHS,
    }


def learned(steps: int, beta: float, data: str, seed: int) -> dict[str, Any]:
    """Also returns the error where the task of each image is known (its classes and its embedding), and the worst."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    began = time.process_time()
    tasks = turns(seed, SIZE)
    module = HyperInterval((PIXELS, HIDDEN, CLASSES), tasks=len(tasks), kappa=KAPPA, seed=seed)
    rule = torch.optim.Adam(module.parameters(), lr=RATE)
    drawn = torch.Generator().manual_seed(seed)
    stored: list[Interval] = []
    for task, classes in enumerate(tasks):
        inputs, labels = digits(data).of(classes)
        for step in range(steps):
            rows = torch.randint(0, len(inputs), (ROWS,), generator=drawn)
            rule.zero_grad(set_to_none=True)
            worst = WORST * min(1.0, 2 * step / steps)  # bounds are trained once the centers fit
            module.loss(inputs[rows], labels[rows], task, stored, worst=worst, beta=beta).backward()
            rule.step()
        stored.append(module.stored(task))
    seconds, half = time.process_time() - began, digits(data)
    with torch.no_grad():
        wrong = error(module.at(module.universal(len(tasks)), half.test_inputs), half.test_labels)
        known, bound = [], []
        for task, classes in enumerate(tasks):
            rows = torch.isin(half.test_labels, torch.tensor(classes))
            inputs, labels = half.test_inputs[rows], half.test_labels[rows]
            found = module.logits(inputs, module.weights(module.box(task)))
            known.append(error(found.center[:, classes], _place(labels, classes)))
            bound.append(error(worst_logits(found, labels), labels))
    return {
        "loss": wrong,
        "known_task": mean(known),
        "worst_case": mean(bound),
        "seconds": round(seconds, 2),
        "parameters": sum(p.numel() for p in module.parameters()),
    }


def _place(labels: torch.Tensor, classes: list[int]) -> torch.Tensor:
    return torch.tensor([classes.index(int(one)) for one in labels])
