"""LLM-QFA (Yi et al., arXiv:2405.20202): one training for all budgets, against one for each.

Both sides begin with the same trained model, hold it in integers of 2, 3 and 4 bits with a LoRA of the same rank per
width, and train as many steps; the separate side trains four times, with the widths fixed. So its four models cost four
times the steps. A ratio is of validation losses at the same widths: the subnet's over the separately tuned model's. The
paper has no such figure (its tables compare accuracies of tasks): it says that the subnets keep up.

The study `gptq` takes the supernet's integers of each width from GPTQ on training text, as the paper does, in place of
rounding to nearest: a ratio is of the trained supernets' validation losses at the same widths. Both starts have a grid
of rates of their own.
"""

from __future__ import annotations

import copy
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean

import torch
from torch import nn

from claims import Row, Study
from claims._grid import Tuned, tuned
from claims._lm import batches, loss_of, rate_at, validation_loss
from claims._trials import Trials
from gossamer import optimizer as optimizer_methods
from gossamer.model.adapter import adapt
from gossamer.model.adapter.qfa import Qfa
from gossamer.model.bit_widths import Widths
from gossamer.model.forward_adapter import caller_of
from gossamer.model.integer_widths import integers_of, weight_checksums
from gossamer.model.qfa_linear import bit_widths, qfa_layers, set_widths
from gossamer.quantize import build
from gossamer.quantize.model.layers import Calibration, quantize_layers
from gossamer.store.integers_folder import IntegersContent, write_integers
from grow_shrink.quantize import CALIBRATION, SHAPE, TOKENS, base

BUDGETS, SEEDS, STEPS, BASE_STEPS, RANK = (2.25, 2.5, 3.0, 3.5), 2, 96, 200, 4
START, GROUP = 4e-3, 64


def studies(*, quick: bool) -> list[Study]:
    sizes = (8, 20, 1) if quick else (STEPS, BASE_STEPS, SEEDS)
    return [Study("budgets", partial(budgets, *sizes)), Study("gptq", partial(starts, *sizes))]


def budgets(steps: int, base_steps: int, seeds: int, trials: Trials) -> list[Row]:
    def run(side: str, rate: float, seed: int) -> dict[str, float]:
        return trials(
            f"{side}, {steps} steps after {base_steps}, rate {rate:.4g}, seed {seed}",
            partial(losses, side, rate, steps, base_steps, seed),
        )

    sides = Sides.of("supernet", "separate", run, seeds)
    return [
        sides.row(
            budget,
            claim=f"loss at {budget:g} bits on average; holds: within 1 % with a quarter of the steps in all",
            baseline="tuned for these widths alone",
            is_held=lambda worst: worst <= 1.01,
            setting=f"{base_steps} steps; then LoRA of rank {RANK}, {steps} steps of {TOKENS} tokens; groups of "
            f"{GROUP}, rounded to nearest",
        )
        for budget in BUDGETS
    ]


def starts(steps: int, base_steps: int, seeds: int, trials: Trials) -> list[Row]:
    def run(by: str, rate: float, seed: int) -> dict[str, float]:
        return trials(
            f"{by}, {steps} steps after {base_steps}, rate {rate:.4g}, seed {seed}",
            partial(losses, "supernet", rate, steps, base_steps, seed, by),
        )

    sides = Sides.of("gptq", "round_to_nearest", run, seeds)
    before = {
        by: [
            trials(f"{by} after {base_steps}, untrained, seed {seed}", partial(untrained, by, base_steps, seed))
            for seed in range(seeds)
        ]
        for by in sides.grids
    }
    return [
        sides.row(
            budget,
            claim=f"loss at {budget:g} bits on average with integers of GPTQ; holds: below 1 with every seed",
            baseline="rounded to nearest",
            is_held=lambda worst: worst < 1,
            setting=f"{base_steps} steps; then LoRA of rank {RANK}, {steps} steps of {TOKENS} tokens; groups of "
            f"{GROUP}; {CALIBRATION} sequences of training text calibrate",
            untrained=before,
        )
        for budget in BUDGETS
    ]


@dataclass(frozen=True)
class Sides:
    """Two sides, each tuned by the same number of trials: losses at every budget, by seed."""

    ours: str
    theirs: str
    grids: Mapping[str, Tuned]
    found: Mapping[str, Sequence[Mapping[str, float]]]

    @staticmethod
    def of(ours: str, theirs: str, run: Callable[[str, float, int], dict[str, float]], seeds: int) -> Sides:
        """Tune both sides on seed 0, and run the best rate with every seed."""
        names = (ours, theirs)
        grids = tuned(
            {name: lambda rate, name=name: mean(run(name, rate, 0).values()) for name in names},
            dict.fromkeys(names, START),
            factor=2.0,
            least=3,
            most=4,
        )
        return Sides(ours, theirs, grids, {n: [run(n, grids[n].best, seed) for seed in range(seeds)] for n in names})

    def row(
        self,
        budget: float,
        *,
        claim: str,
        baseline: str,
        is_held: Callable[[float], bool],
        setting: str,
        untrained: Mapping[str, Sequence[Mapping[str, float]]] | None = None,
    ) -> Row:
        """Return the row of a budget; `is_held`: of the largest ratio of a seed."""

        def at(runs: Sequence[Mapping[str, float]]) -> list[float]:
            return [one[str(budget)] for one in runs]

        pairs = zip(at(self.found[self.ours]), at(self.found[self.theirs]), strict=True)
        each = [ours / theirs for ours, theirs in pairs]
        return Row(
            method="qfa",
            claim=claim,
            baseline=baseline,
            ratio=round(mean(each), 5),
            paper_ratio=None,
            spread=(round(min(each), 5), round(max(each), 5)),
            seeds=len(each),
            setting=f"byte LM of {SHAPE.layers} layers of {SHAPE.width}, {setting}",
            holds=is_held(max(each)),
            details={
                name: {
                    "losses": at(runs),
                    **({"untrained": at(untrained[name])} if untrained else {}),
                    "rates": self.grids[name].told(),
                }
                for name, runs in self.found.items()
            },
        )


def by_gptq(model: nn.Module, seed: int, folder: Path) -> None:
    """Write the folder of the model's integers by GPTQ."""
    sequences = next(iter(batches(900 + seed, CALIBRATION, SHAPE.context, 1)))[:, :-1]
    given = [{"bytes_": part} for part in sequences.split(16)]
    tensors: dict[str, torch.Tensor] = {}
    layers: list[str] = []
    for bits in Qfa().widths:
        made = copy.deepcopy(model)
        quantizer = build({"gptq": {"bits": bits, "group": GROUP}})
        report = quantize_layers(made, quantizer, Calibration(caller=caller_of(made, given[0]), batches=given))
        layers = [one.name for one in report.layers]
        tensors |= integers_of(made, bits)
    content = IntegersContent(
        tensors=tensors,
        method="gptq",
        group=GROUP,
        widths=Qfa().widths,
        layers=layers,
        weights=weight_checksums(model),
        said={},
    )
    write_integers(folder, content)


def started(by: str, base_steps: int, seed: int) -> tuple[nn.Module, dict[float, Widths]]:
    """Return the supernet before any step, and the widths of every budget."""
    model = base(base_steps, seed)
    with tempfile.TemporaryDirectory() as place:
        integers = ""
        if by == "gptq":
            integers = str(Path(place, "integers"))
            by_gptq(model, seed, Path(integers))
        adapt(model, Qfa(rank=RANK, alpha=2.0 * RANK, group=GROUP, integers=integers), seed)
    known = bit_widths(model)
    return model, {budget: known.near(budget, random.Random(seed)) for budget in BUDGETS}


def untrained(by: str, base_steps: int, seed: int) -> dict[str, float]:
    """Return the validation loss at every budget before any step."""
    start, chosen = started(by, base_steps, seed)
    found = {}
    for budget, widths in chosen.items():
        set_widths(start.eval(), widths)
        found[str(budget)] = validation_loss(start, SHAPE.context)
    return found


def losses(
    side: str, rate: float, steps: int, base_steps: int, seed: int, by: str = "round_to_nearest"
) -> dict[str, float]:
    """Return the validation loss at every budget, of one supernet or of a model for each."""
    start, chosen = started(by, base_steps, seed)
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
