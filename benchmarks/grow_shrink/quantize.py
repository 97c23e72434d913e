"""GPTQ (Frantar et al., arXiv:2210.17323) against rounding to nearest, at 2, 3, 4 and 8 bits in groups of 64.

A ratio is of what the loss of the trained model rises by when it is quantized: GPTQ's rise over that of rounding to
nearest. The paper's ratio is of OPT-175B's perplexity on WikiText2 at 4 bits, 8.34 in full precision: (8.37 - 8.34) /
(10.54 - 8.34); at 3 bits rounding to nearest does not survive there, and the paper has no 2 bits without groups.
Nothing is tuned: neither side has a setting that the other lacks, but the calibration text that GPTQ reads.
"""

from __future__ import annotations

import copy
from functools import partial
from statistics import mean
from typing import Any

import torch

from claims import Row, Study
from claims._lm import Lm, Shape, batches, loss_of, rate_at, validation_loss
from claims._trials import Trials
from gossamer import optimizer as optimizer_methods
from gossamer.model.forward_adapter import caller_of
from gossamer.quantize import build
from gossamer.quantize.model.layers import Calibration, quantize_layers

SHAPE, STEPS, TOKENS, SEEDS = Shape(width=64, layers=2), 200, 2048, 3
RATE, CALIBRATION = 1e-2, 32  # of AdamW; sequences
BITS = (2, 3, 4, 8)
PAPER = {4: 0.014}


def studies(*, quick: bool) -> list[Study]:
    return [Study("bits", partial(bits, 20 if quick else STEPS, 1 if quick else SEEDS))]


def bits(steps: int, seeds: int, trials: Trials) -> list[Row]:
    found = [trials(f"{steps} steps, seed {seed}", partial(losses, steps, seed)) for seed in range(seeds)]
    rows = []
    for one in BITS:
        rises = {
            by: [run[f"{by} {one}"] - run["full"] for run in found] for by in ("round_to_nearest", "gptq", "activation")
        }
        is_rise = min(rises["round_to_nearest"]) > 0  # 8 bits may change nothing that can be measured
        pairs = zip(rises["gptq"], rises["round_to_nearest"], strict=True)
        each = [ours / plain for ours, plain in pairs] if is_rise else []
        rows.append(
            Row(
                method="gptq",
                claim=f"rise of the validation loss at {one} bits; holds: below 1 with every seed",
                baseline="round_to_nearest",
                ratio=round(mean(rises["gptq"]) / mean(rises["round_to_nearest"]), 4) if is_rise else None,
                paper_ratio=PAPER.get(one),
                spread=(round(min(each), 4), round(max(each), 4)) if is_rise else None,
                seeds=seeds,
                setting=f"byte LM of {SHAPE.layers} layers of {SHAPE.width}, {steps} steps of {TOKENS} tokens; groups "
                f"of 64, asymmetric; {CALIBRATION} sequences of training text calibrate",
                holds=max(each) < 1 if is_rise else None,
                details={"loss": [run["full"] for run in found], "rises": rises},
            )
        )
    return rows


def losses(steps: int, seed: int) -> dict[str, float]:
    """Train a model, and return its validation loss in full precision and quantized in every way."""
    model = base(steps, seed)
    sequences = next(iter(batches(900 + seed, CALIBRATION, SHAPE.context, 1)))[:, :-1]
    given = [{"bytes_": part} for part in sequences.split(16)]
    found = {"full": validation_loss(model, SHAPE.context)}
    ways: dict[str, Any] = {"round_to_nearest": {}, "gptq": {}, "activation": {"order": "activation"}}
    for name, more in ways.items():
        for one in BITS:
            quantized = copy.deepcopy(model)
            quantizer = build({("gptq" if name == "activation" else name): {"bits": one, **more}})
            quantize_layers(quantized, quantizer, Calibration(caller=caller_of(quantized, given[0]), batches=given))
            found[f"{name} {one}"] = validation_loss(quantized, SHAPE.context)
    return found


def base(steps: int, seed: int) -> Lm:
    """Return a model trained by AdamW."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = Lm(SHAPE)
    params = dict(model.named_parameters())
    rule = optimizer_methods.build({"adamw": {"lr": RATE}})
    values = {name: p.detach() for name, p in params.items()}
    state = rule.init(values)
    for step, rows in enumerate(batches(seed, TOKENS // SHAPE.context, SHAPE.context, steps)):
        grads = torch.autograd.grad(loss_of(model, rows), list(params.values()))
        rule.update(values, dict(zip(params, grads, strict=True)), state, lr_scale=rate_at(step, steps), step=step)
    return model.eval()
