"""One model type: a small one of it, cut, and compared with one process, gradient by gradient."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from gossamer.model.split.reference import run_lockstep, stages_of
from gossamer.model.split.split_points import balanced_split
from gossamer.model.split.trace import trace
from gossamer.model.unit_seeds import UnitSeeds, unit_seeds
from gossamer.model.units import block_names, unit_names
from zoo.case import Different, found, loss_of, module_of
from zoo.inputs import batch_of

TOLERANCE = 1e-5  # of the largest entry of a gradient
NOISE = 1e-4  # a gradient below this part of the largest of all (the bias of attention's keys) is rounding alone
BESIDE = 0.01  # price of a unit that is no block: stages get equal numbers of blocks
Batch = Mapping[str, Any]


def check(kind: str, stages: Sequence[int]) -> dict[str, Any]:
    """What was compared; raises what went wrong."""
    warnings.simplefilter("ignore")
    case = found(kind)
    module, exact = module_of(case), True
    for padded in (False, True) if case.form.length else (False,):
        given = [batch_of(case.form, seed=seed, padded=padded) for seed in range(2)]
        expected = uncut(module, given)
        flow = trace(module, lambda b=given[0]: seeded({}, module, b), units=unit_names(module))  # type: ignore[misc]
        for count in stages:
            exact &= same(expected, cut(module, flow, count, given), f"{count} stages{', padded' if padded else ''}")
    return {
        "recipe": case.recipe,
        "exact": exact,
        "calls": len(flow.calls),
        "shape": list(case.form.shape),
        "reached": reached(module, expected[1]),
    }


def reached(module: nn.Module, gradients: Mapping[str, Tensor]) -> float:
    """Part of the parameters that have a gradient: a model of text and sound that is given text alone uses half."""
    sizes = {name: p.numel() for name, p in module.named_parameters()}
    return round(sum(sizes[name] for name in gradients) / sum(sizes.values()), 3)


def seeded(seeds: Mapping[int, UnitSeeds], module: nn.Module, batch: Batch) -> Tensor:
    """The loss, with every generator set by the batch."""
    number = int(batch["labels"].sum())
    random.seed(number)
    numpy.random.seed(number % 2**32)
    if id(module) not in seeds:
        return loss_of(module, batch)
    with seeds[id(module)].at(0, number):
        return loss_of(module, batch)


def uncut(module: nn.Module, given: Sequence[Batch]) -> tuple[list[Tensor], dict[str, Tensor]]:
    module = copy.deepcopy(module)
    seeds = {id(module): unit_seeds(module, seed=1)}
    losses = []
    for rows in given:
        loss = seeded(seeds, module, rows)
        with seeds[id(module)].at(0, 0):
            loss.backward()
        losses.append(loss.detach())
    return losses, {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


def cut(module: nn.Module, flow: Any, stages: int, given: Sequence[Batch]) -> tuple[list[Tensor], dict[str, Tensor]]:
    prices = dict.fromkeys(flow.units, BESIDE) | dict.fromkeys(block_names(module), 1.0)
    parts = stages_of(module, flow, balanced_split(flow, stages, costs=prices))
    seeds = {id(part.module): unit_seeds(part.module, seed=1) for part in parts}
    outcome = run_lockstep(parts, partial(seeded, seeds), given)
    return outcome.losses, outcome.gradients


def same(expected: Any, ours: Any, where: str) -> bool:
    """Whether bit for bit; raises where not even close."""
    for theirs, mine in zip(expected[0], ours[0], strict=True):
        if not torch.isfinite(theirs):
            raise Different(f"{where}: the uncut loss is {float(theirs)}")
        if not torch.equal(theirs, mine):
            raise Different(f"{where}: loss {float(mine)} instead of {float(theirs)}")
    exact, noise = True, NOISE * float(max(g.abs().max() for g in expected[1].values() if g.numel()))
    for name in expected[1].keys() | ours[1].keys():
        theirs, mine = expected[1].get(name), ours[1].get(name)
        if theirs is None or mine is None:
            known = theirs if theirs is not None else mine
            if known is not None and known.any():
                raise Different(f"{where}: {name} has {'no' if mine is None else 'a'} gradient")
            continue
        exact &= torch.equal(theirs, mine)
        if not theirs.numel():
            continue
        error = float((theirs - mine).abs().max() / theirs.abs().max().clamp(min=noise))
        if not error <= TOLERANCE:
            raise Different(f"{where}: the gradient of {name} is off by {error:.1e} of its largest entry")
    return exact
