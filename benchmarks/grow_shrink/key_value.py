"""Discrete key-value bottleneck (Traeuble et al., arXiv:2207.11240): digits one class at a time, without forgetting.

A linear head on the same features is trained on the same batches, by plain SGD. Both have one value, the rate, tuned on
one half of the digits and reported on the other, with other orders of the classes. The features are the pixels: the
keys are placed on the pixels of all classes without labels, as the paper places them on unlabelled data.
"""

from __future__ import annotations

import time
from functools import partial
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from claims import Row, Study
from claims._frozen import Family, Frozen
from claims._trials import Trials
from gossamer.model.networks.key_value import KeyValueBottleneck
from grow_shrink._digits import CLASSES, HALVES, PIXELS, digest, digits, error, turns

EPOCHS, ROWS, PLACING = 10, 32, 20


def studies(*, quick: bool) -> list[Study]:
    return [Study("digits", partial(in_turn, 1 if quick else 5))]


def in_turn(seeds: int, trials: Trials) -> list[Row]:
    tuning, reporting = (
        Family(data=name, seeds=tuple(range(100 * at, 100 * at + seeds)), digest=digest(name))
        for at, name in enumerate(HALVES)
    )
    protocol = Frozen(tuned_on=tuning, reported_on=reporting)
    sides = {name: partial(learned, module) for name, module in (("linear head", "head"), ("bottleneck", "bottleneck"))}
    found = protocol(sides, {"linear head": 0.03, "bottleneck": 300.0}, trials, factor=4.0)
    pairs = [b / h for b, h in zip(found["bottleneck"].losses, found["linear head"].losses, strict=True)]
    value = found["bottleneck"].tuned.best
    joint = [trials(f"jointly, value {value:.6g}, seed {s}", partial(jointly, value, s)) for s in reporting.seeds]
    gap = [b - j for b, j in zip(found["bottleneck"].losses, joint, strict=True)]
    details = protocol.told() | {name: one.told() for name, one in found.items()}
    setting = f"8 x 8 digits of one half, a class at a time, {EPOCHS} epochs of batches of {ROWS}, plain SGD"
    return [
        Row(
            method="key_value",
            claim="error over all classes after the last; holds: below that of the head with every order",
            baseline="linear head on the same features",
            ratio=round(mean(pairs), 4),
            paper_ratio=None,
            spread=(round(min(pairs), 4), round(max(pairs), 4)),
            seeds=seeds,
            setting=setting,
            holds=max(pairs) < 1,
            details=details,
        ),
        Row(
            method="key_value",
            claim="error in turn less error of the same bottleneck on all classes at once; holds: at most 0.03",
            baseline="bottleneck on all classes at once",
            ratio=round(mean(gap), 4),
            paper_ratio=None,
            spread=(round(min(gap), 4), round(max(gap), 4)),
            seeds=seeds,
            setting=setting,
            holds=mean(gap) <= 0.03,
            details=protocol.told() | {"jointly": joint},
        ),
    ]


def learned(kind: str, rate: float, data: str, seed: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    began = time.process_time()
    module = built(kind, data, seed)
    for classes in turns(seed, 1):
        descend(module, *digits(data).of(classes), rate=rate, seed=seed)
    return {
        "loss": tested(module, data),
        "seconds": round(time.process_time() - began, 2),
        "parameters": sum(p.numel() for p in module.parameters() if p.requires_grad),
    }


def jointly(rate: float, seed: int) -> float:
    torch.set_num_threads(1)
    module, data = built("bottleneck", HALVES[1], seed), digits(HALVES[1])
    descend(module, data.inputs, data.labels, rate=rate, seed=seed)
    return tested(module, HALVES[1])


def built(kind: str, data: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    if kind == "head":
        return nn.Linear(PIXELS, CLASSES)
    module = KeyValueBottleneck(nn.Identity(), features=PIXELS, classes=CLASSES, codebooks=64, pairs=128, seed=seed)
    inputs, drawn = digits(data).inputs, torch.Generator().manual_seed(seed)
    batches = (inputs[torch.randperm(len(inputs), generator=drawn)[:256]] for _ in range(PLACING))
    module.fit_keys(batches, seed=seed)
    return module


def descend(module: nn.Module, inputs: Tensor, labels: Tensor, *, rate: float, seed: int) -> None:
    drawn = torch.Generator().manual_seed(seed)
    params = [p for p in module.parameters() if p.requires_grad]
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(inputs), generator=drawn).split(ROWS):
            grads = torch.autograd.grad(cross_entropy(module(inputs[rows]), labels[rows]), params)
            with torch.no_grad():
                for p, grad in zip(params, grads, strict=True):
                    p -= rate * grad


@torch.no_grad()
def tested(module: nn.Module, data: str) -> float:
    half = digits(data)
    return error(module(half.test_inputs), half.test_labels)
