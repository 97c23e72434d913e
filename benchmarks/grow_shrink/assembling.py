"""Deep model assembling (Ni et al., "Deep Incubation", arXiv:2212.04129): flop to the loss of training from scratch.

A meta model of one block per part is trained, then each part of the target in it while all else rests, without any
network between them, then the parts are linked and trained end to end (`grow/part.py`, `grow/assemble.py`; this study
does the same to the byte LM of the other claims). The paper: 43 % less cost for ViT-Huge, so 0.57.

Counted are 2 flop per weight and token forward, as many for the gradient of what a layer reads where something before
it is trained, and as many for that of its weights where they are; attention alike. Parts run beside each other, so the
time of a run on K machines is that of the longest part; `ratio` counts the work of all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from claims import Row, Study
from claims._grid import tuned
from claims._lm import Lm, Shape, batches, loss_of, rate_at, validation_loss
from claims._trials import Trials
from gossamer import optimizer as optimizer_methods

PARTS, COUNT = 2, 2  # blocks of the meta model, and real ones of each part
WIDTH, CONTEXT, TOKENS, RATE = 96, 128, 4096, 4e-3
PAPER = 0.57
META, EACH = 0.25, 0.25  # steps of the meta model and of each part, of those from scratch
LENGTHS = (0.2, 0.35, 0.5, 0.65, 0.8)  # of the training end to end, of those from scratch
Weights = dict[str, Tensor]


def studies(*, quick: bool) -> list[Study]:
    steps, seeds, most, lengths = (16, 1, 1, (0.5,)) if quick else (240, 3, 5, LENGTHS)
    return [Study("flop_to_loss", partial(flop_to_loss, steps, seeds, most, lengths), worth=3)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One training. blocks: of the model; trained: of these; the ends: whether embedding and head are trained, too."""

    blocks: int
    trained: range
    stem: bool
    head: bool
    steps: int

    def flop(self) -> float:
        """Return the work of all steps."""
        block = 12 * WIDTH * WIDTH + 2 * CONTEXT * WIDTH  # multiplications of a token: matrices, scores and their sums
        head = 256 * WIDTH
        before = self.stem
        done = 0.0
        for at in range(self.blocks):
            is_trained = at in self.trained
            done += 2 * block * (1 + before + is_trained)
            before = before or is_trained
        done += 2 * head * (1 + before + self.head)
        return done * self.steps * TOKENS

    def is_trained(self, name: str) -> bool:
        if name.startswith("blocks."):
            return int(name.split(".")[1]) in self.trained
        return self.stem if name.startswith("embed") else self.head


def whole(blocks: int, steps: int) -> Stage:
    return Stage(blocks=blocks, trained=range(blocks), stem=True, head=True, steps=steps)


def part(index: int, steps: int) -> Stage:
    own = range(index, index + COUNT)
    return Stage(blocks=PARTS - 1 + COUNT, trained=own, stem=index == 0, head=index == PARTS - 1, steps=steps)


def flop_to_loss(steps: int, seeds: int, most: int, lengths: tuple[float, ...], trials: Trials) -> list[Row]:
    blocks = PARTS * COUNT
    middle = lengths[len(lengths) // 2]

    def scratch(rate: float, seed: int) -> float:
        key = f"scratch, {steps} steps, rate {rate:.4g}, seed {seed}"
        return float(trials(key, lambda: trained(None, whole(blocks, steps), rate, seed)[0]))

    def assembled(rate: float, seed: int) -> dict[str, float]:
        key = f"assembled, {steps} steps, rate {rate:.4g}, seed {seed}"
        found: dict[str, float] = trials(key, lambda: losses(steps, rate, seed, lengths))
        return found

    grids = tuned(
        {"scratch": lambda rate: scratch(rate, 0), "assembled": lambda rate: assembled(rate, 0)[f"{middle:g}"]},
        {"scratch": RATE, "assembled": RATE},
        least=min(3, most),
        most=most,
    )
    goals = [scratch(grids["scratch"].best, seed) for seed in range(seeds)]
    runs = [assembled(grids["assembled"].best, seed) for seed in range(seeds)]
    of = whole(blocks, steps).flop()
    first = work_before(steps)
    ratios = [
        reached(run, goal, lengths, lambda length: (first + length * of) / of)
        for run, goal in zip(runs, goals, strict=True)
    ]
    has_all = all(math.isfinite(one) for one in ratios)
    longest = max(part(i, round(EACH * steps)).flop() for i in range(PARTS))
    size = sum(p.numel() for p in Lm(shape(blocks)).parameters())
    return [
        Row(
            method="assembling",
            claim="flop to the loss of training from scratch, all parts counted; holds: below 1 with every seed",
            baseline="from scratch",
            ratio=round(mean(ratios), 4) if has_all else None,
            paper_ratio=PAPER,
            spread=(round(min(ratios), 4), round(max(ratios), 4)) if has_all else None,
            seeds=seeds,
            setting=f"byte LM of {blocks} layers of {WIDTH}, {size:,} parameters; {PARTS} parts; "
            f"{steps} steps of {TOKENS:,} tokens from scratch",
            holds=has_all and max(ratios) < 1,
            details={
                "losses_from_scratch": goals,
                "losses_assembled": runs,
                "flop_from_scratch": of,
                "share_before_end_to_end": round(first / of, 4),
                "share_before_end_to_end_side_by_side": round(
                    (whole(PARTS, round(META * steps)).flop() + longest) / of, 4
                ),
                **{name: one.told() for name, one in grids.items()},
            },
        )
    ]


def work_before(steps: int) -> float:
    """Return the flop of the meta model and of all parts."""
    each = (part(index, round(EACH * steps)) for index in range(PARTS))
    return whole(PARTS, round(META * steps)).flop() + sum(one.flop() for one in each)


def reached(run: Mapping[str, float], goal: float, lengths: Iterable[float], share: Callable[[float], float]) -> float:
    """Return the share at which the loss is the goal, between the lengths by a line; infinity where none reaches it."""
    before: tuple[float, float] | None = None
    for length in lengths:
        loss = run[f"{length:g}"]
        if loss <= goal:
            if before is None:
                return share(length)
            at = before[0] + (length - before[0]) * (before[1] - goal) / (before[1] - loss)
            return share(at)
        before = (length, loss)
    return math.inf


def losses(steps: int, rate: float, seed: int, lengths: Iterable[float]) -> dict[str, float]:
    """Return the validation loss of the meta model, of the assembled one, and after each length of training."""
    found: dict[str, float] = {}
    found["meta"], meta = trained(None, whole(PARTS, round(META * steps)), rate, seed, 1)
    parts = [
        trained(around(meta, index), part(index, round(EACH * steps)), rate, seed, 2 + index)[1]
        for index in range(PARTS)
    ]
    start = linked(parts)
    model = Lm(shape(PARTS * COUNT))
    found["random"] = validation_loss(model, CONTEXT)
    model.load_state_dict(start)
    found["linked"] = validation_loss(model, CONTEXT)
    for length in lengths:
        stage = whole(PARTS * COUNT, round(length * steps))
        found[f"{length:g}"] = trained(start, stage, rate, seed, 2 + PARTS)[0]
    return found


def around(meta: Weights, index: int) -> Weights:
    """Return the model of a part: the meta model with block `index` as often as there are real blocks."""
    found = {name: one for name, one in meta.items() if not name.startswith("blocks.")}
    for block in range(PARTS - 1 + COUNT):
        of = min(max(block - COUNT + 1, index), block)
        found |= renamed(meta, of, block)
    return found


def linked(parts: list[Weights]) -> Weights:
    """Return the target: the stem of the first part, the real blocks of all, the head of the last."""
    found = {"embed.weight": parts[0]["embed.weight"]}
    found |= {name: parts[-1][name] for name in ("norm", "head.weight")}
    for index, one in enumerate(parts):
        for inside in range(COUNT):
            found |= renamed(one, index + inside, index * COUNT + inside)
    return found


def renamed(weights: Weights, block: int, to: int) -> Weights:
    old, new = f"blocks.{block}.", f"blocks.{to}."
    return {name.replace(old, new): one.clone() for name, one in weights.items() if name.startswith(old)}


def shape(blocks: int) -> Shape:
    return Shape(width=WIDTH, layers=blocks, context=CONTEXT)


def trained(start: Weights | None, stage: Stage, rate: float, seed: int, draw: int = 0) -> tuple[float, Weights]:
    """Train from `start` (None: random) on the bytes `draw`; return the validation loss and the weights."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = Lm(shape(stage.blocks))
    if start is not None:
        model.load_state_dict(start)
    params: dict[str, Any] = {name: p for name, p in model.named_parameters() if stage.is_trained(name)}
    rule = optimizer_methods.build({"adamw": {"lr": rate}})
    state = rule.init(params)
    for step, rows in enumerate(batches(100 * draw + seed, TOKENS // CONTEXT, CONTEXT, stage.steps)):
        found = torch.autograd.grad(loss_of(model, rows), list(params.values()))
        norm = math.sqrt(sum(float(one.square().sum()) for one in found))
        if norm > 1.0:
            found = tuple(torch._foreach_mul(found, 1.0 / norm))
        grads = dict(zip(params, found, strict=True))
        rule.update(params, grads, state, lr_scale=rate_at(step, stage.steps), step=step)
    return validation_loss(model, CONTEXT), {name: p.detach().clone() for name, p in model.named_parameters()}
