"""LLM-QFA (Yi et al., arXiv:2405.20202): one training for all budgets, against one for each.

Both sides begin with the same trained model, hold it in integers of 2, 3 and 4 bits with a LoRA of the same rank per
width, and train as many steps; the separate side trains four times, with the widths fixed. So its four models cost four
times the steps. A ratio is of validation losses at the same widths: the subnet's over the separately tuned model's. The
paper has no such figure (its tables compare accuracies of tasks): it says that the subnets keep up.
"""

from __future__ import annotations

import copy
import random
from functools import partial
from statistics import mean

import torch
from torch import nn

from claims import Row, Study
from claims._grid import tuned
from claims._lm import batches, loss_of, rate_at, validation_loss
from claims._trials import Trials
from gossamer import optimizer as optimizer_methods
from gossamer.model.adapter import adapt
from gossamer.model.adapter.qfa import Qfa
from gossamer.model.bit_widths import Widths
from gossamer.model.qfa_linear import bit_widths, qfa_layers, set_widths
from grow_shrink.quantize import SHAPE, TOKENS, base

BUDGETS, SEEDS, STEPS, BASE_STEPS, RANK = (2.25, 2.5, 3.0, 3.5), 2, 96, 200, 4
START = 4e-3


def studies(*, quick: bool) -> list[Study]:
    sizes = (8, 20, 1) if quick else (STEPS, BASE_STEPS, SEEDS)
    return [Study("budgets", partial(budgets, *sizes))]


def budgets(steps: int, base_steps: int, seeds: int, trials: Trials) -> list[Row]:
    def run(side: str, rate: float, seed: int) -> dict[str, float]:
        return trials(
            f"{side}, {steps} steps after {base_steps}, rate {rate:.4g}, seed {seed}",
            partial(losses, side, rate, steps, base_steps, seed),
        )

    sides = {"supernet": "supernet", "separate": "separate"}
    grids = tuned(
        {name: lambda rate, name=name: mean(run(name, rate, 0).values()) for name in sides},
        dict.fromkeys(sides, START),
        factor=2.0,
        least=3,
        most=4,
    )
    found = {name: [run(name, grids[name].best, seed) for seed in range(seeds)] for name in sides}
    rows = []
    for budget in BUDGETS:
        pairs = zip(found["supernet"], found["separate"], strict=True)
        each = [ours[str(budget)] / theirs[str(budget)] for ours, theirs in pairs]
        rows.append(
            Row(
                method="qfa",
                claim=f"loss at {budget:g} bits on average; holds: within 1 % with a quarter of the steps in all",
                baseline="tuned for these widths alone",
                ratio=round(mean(each), 5),
                paper_ratio=None,
                spread=(round(min(each), 5), round(max(each), 5)),
                seeds=seeds,
                setting=f"byte LM of {SHAPE.layers} layers of {SHAPE.width}, {base_steps} steps; then LoRA of rank "
                f"{RANK}, {steps} steps of {TOKENS} tokens; groups of 64, rounded to nearest",
                holds=max(each) <= 1.01,
                details={
                    name: {"losses": [one[str(budget)] for one in runs], "rates": grids[name].told()}
                    for name, runs in found.items()
                },
            )
        )
    return rows


def losses(side: str, rate: float, steps: int, base_steps: int, seed: int) -> dict[str, float]:
    """Return the validation loss at every budget, of one supernet or of a model for each."""
    start = base(base_steps, seed)
    adapt(start, Qfa(rank=RANK, alpha=2.0 * RANK), seed)
    known = bit_widths(start)
    chosen = {budget: known.near(budget, random.Random(seed)) for budget in BUDGETS}
    found = {}
    if side == "supernet":
        train(start, rate, steps, seed, fixed=None)
    for budget, widths in chosen.items():
        model = start
        if side == "separate":
            model = copy.deepcopy(start)
            train(model, rate, steps, seed, fixed=widths)
        set_widths(model.eval(), widths)
        found[str(budget)] = validation_loss(model, SHAPE.context)
    return found


def train(model: nn.Module, rate: float, steps: int, seed: int, *, fixed: Widths | None) -> None:
    """Train the adapters. `fixed`: the widths of all steps; None: those of the supernet's schedule."""
    model.train()
    known = bit_widths(model)
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    values = {name: p.detach() for name, p in params.items()}
    rule = optimizer_methods.build({"adamw": {"lr": rate}})
    states = {name: rule.init({name: one}) for name, one in values.items()}
    counts = dict.fromkeys(params, 0)
    for step, rows in enumerate(batches(50 + seed, TOKENS // SHAPE.context, SHAPE.context, steps)):
        widths = known.at(seed, step) if fixed is None else fixed
        for layer, bits in zip(qfa_layers(model).values(), widths, strict=True):
            layer.step_width = bits
        grads = torch.autograd.grad(loss_of(model, rows), list(params.values()), allow_unused=True)
        for name, grad in zip(params, grads, strict=True):
            if grad is not None:  # the others stay as they are
                scale = rate_at(step, steps)
                rule.update({name: values[name]}, {name: grad}, states[name], lr_scale=scale, step=counts[name])
                counts[name] += 1
