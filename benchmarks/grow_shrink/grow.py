"""Growth (LEMON, arXiv:2310.07999; G_stack, arXiv:2405.15319; the V-cycle, arXiv:2404.07999): flop to a loss.

The loss is that of training the large model from scratch for all its steps, at its best rate. A grown run takes the
least length, of several that each decay to their end, at which it is as low (between two lengths: by the logarithm).
`ratio` counts the small model's flop, and of the V-cycle those of all its parts; `ratio_without_source` in the details
leaves the small model out. Both sides tune their rate by the same number of trials, grown runs at half of the length;
the small model's rate is not tuned. Flop: 6 for each weight of a matmul and token, and attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from claims import Row, Study
from claims._grid import tuned
from claims._lm import VALIDATION, Lm, Shape, batches, loss_of, rate_at, text, validation_loss
from claims._trials import Trials
from gossamer import grow
from gossamer import optimizer as optimizer_methods
from gossamer.grow import GrowthTask
from gossamer.model.structure.model import structure_of

LARGE = Shape(width=128, layers=4, heads=8)
SMALL = {
    "lemon": Shape(width=64, layers=2, heads=4),
    "g_stack": Shape(width=128, layers=1, heads=8),
    "v_cycle": Shape(width=64, layers=2, heads=4),
}
QUICK_LARGE = Shape(width=64, layers=4, heads=4)
QUICK_SMALL = {
    "lemon": Shape(width=32, layers=2, heads=2),
    "g_stack": Shape(width=64, layers=1, heads=4),
    "v_cycle": Shape(width=32, layers=2, heads=2),
}
STEPS, TOKENS, SEEDS = 400, 2048, 2
RATE, SMALL_RATE = 8e-3, 8e-3
LENGTHS = (0.25, 0.5, 0.75, 1.0)  # of the steps from scratch
SOURCE = {"lemon": 0.5, "g_stack": 0.1, "v_cycle": 0.5}  # steps of the small model, of the same
WORTH = {"lemon": 9, "g_stack": 8, "v_cycle": 7}
FIRST = 0.1  # steps of the large model before it is coalesced (V-cycle)
ALPHA = 0.25
PAPERS = {"lemon": "0.43 (ViT) and 0.67 (BERT)", "g_stack": "0.65 in tokens of the large model", "v_cycle": "0.8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is compared. `small`: the source of each method."""

    large: Shape
    small: Mapping[str, Shape]
    steps: int
    seeds: int

    def told(self, method: str) -> str:
        small, large = self.small[method], self.large
        count = sum(p.numel() for p in Lm(large).parameters())
        return (
            f"byte LM of {large.layers} layers of {large.width} ({count:,} parameters) from {small.layers} of "
            f"{small.width} trained for {SOURCE[method]:g} of {self.steps} steps of {TOKENS:,} tokens; loss of "
            f"{VALIDATION} sequences of standard library text"
        )


def studies(*, quick: bool) -> list[Study]:
    setting = (
        Setting(large=QUICK_LARGE, small=QUICK_SMALL, steps=120, seeds=1)
        if quick
        else Setting(large=LARGE, small=SMALL, steps=STEPS, seeds=SEEDS)
    )
    return [Study(name, partial(flop_to_loss, setting, name), worth=worth) for name, worth in WORTH.items()]


@dataclass(slots=True, kw_only=True)
class Trained:
    """A model with its optimizer's states."""

    model: Lm
    state: dict[str, dict[str, Tensor]]
    steps: int


def train(
    model: Lm, rate: float, steps: int, *, seed: int, moments: Mapping[str, Tensor] | None = None, moment_steps: int = 0
) -> Trained:
    """Train with a warm-up of a tenth of the steps, and a cosine to a tenth of the rate."""
    torch.set_num_threads(1)
    text()
    params = dict(model.named_parameters())
    rule = optimizer_methods.build({"adamw": {"lr": rate}})
    state = rule.init({name: p.detach() for name, p in params.items()})
    for name, slots in state.items() if moments else ():
        for slot, tensor in slots.items():
            assert moments is not None
            tensor.copy_(moments[f"{slot}/{name}"])
    rows = batches(seed, TOKENS // model.shape.context, model.shape.context, steps)
    for step, batch in enumerate(rows):
        found = torch.autograd.grad(loss_of(model, batch), list(params.values()))
        norm = math.sqrt(sum(float(one.square().sum()) for one in found))
        scaled = torch._foreach_mul(found, min(1.0, 1.0 / norm))
        grads = dict(zip(params, scaled, strict=True))
        with torch.no_grad():
            rule.update(params, grads, state, lr_scale=rate_at(step, steps), step=moment_steps + step)
    return Trained(model=model, state=state, steps=moment_steps + steps)


def flop(shape: Shape, steps: float) -> float:
    """Return the flop of training: 6 for each weight of a matmul and token, and attention, forward and backward."""
    weights = 12 * shape.layers * shape.width**2 + 256 * shape.width
    return steps * TOKENS * (6 * weights + 12 * shape.layers * shape.context * shape.width)


def fresh(shape: Shape, seed: int) -> Lm:
    torch.manual_seed(seed)
    return Lm(shape)


@cache
def source(shape: Shape, steps: int, seed: int) -> Trained:
    """Return the small model, trained on other batches than the large one."""
    return train(fresh(shape, seed), SMALL_RATE, steps, seed=500 + seed)


@cache
def coalesced(small: Shape, large: Shape, steps: int, first: int, rate: float, seed: int) -> tuple[Trained, Trained]:
    """Return the large model after its first steps, and the small one that it was coalesced to, trained."""
    before = train(fresh(large, seed), rate, first, seed=500 + seed)
    made = grown(before, small, "coalesce")
    return before, train(made, SMALL_RATE, steps, seed=600 + seed)


def grown(of: Trained, shape: Shape, by: Any, *, before: Lm | None = None, moments: bool = False) -> Lm:
    """Return a model of `shape`; its moments are left in `model.moments`."""
    target = Lm(shape)
    held = {f"{slot}/{name}": one for name, slots in of.state.items() for slot, one in slots.items()}
    task = GrowthTask(
        source=structure_of(of.model, tokens=of.model.shape.context),
        target=structure_of(target, tokens=shape.context),
        tensors={name: p.detach().double() for name, p in of.model.named_parameters()},
        moments=held if moments else {},
        degrees={"mean": 1, "square": 2} if moments else {},
        before={} if before is None else {name: p.detach() for name, p in before.named_parameters()},
    )
    found = grow.build(by).grow(task)
    with torch.no_grad():
        for name, p in target.named_parameters():
            p.copy_(found.tensors[name])
    vars(target)["moments"] = dict(found.moments)
    return target


def scratch(setting: Setting, rate: float, seed: int) -> float:
    return validation_loss(train(fresh(setting.large, seed), rate, setting.steps, seed=seed).model, 128)


def from_small(setting: Setting, method: str, rate: float, length: float, seed: int) -> float:
    """Return the loss of the large model, grown and trained for `length` of the steps."""
    steps, small = round(length * setting.steps), setting.small[method]
    source_steps = round(SOURCE[method] * setting.steps)
    if method == "v_cycle":
        first = round(FIRST * setting.steps)
        before, of = coalesced(small, setting.large, source_steps, first, rate, seed)
        by = {"interpolate": {"onto": "before", "alpha": ALPHA}}
        model = grown(of, setting.large, by, before=before.model)
        return validation_loss(train(model, rate, steps, seed=seed).model, 128)
    of = source(small, source_steps, seed)
    model = grown(of, setting.large, method, moments=method == "lemon")
    moments = vars(model)["moments"]
    more = {"moments": moments, "moment_steps": of.steps} if moments else {}
    return validation_loss(train(model, rate, steps, seed=seed, **more).model, 128)


def flop_to_loss(setting: Setting, method: str, trials: Trials) -> list[Row]:
    shared, shape = trials.of("scratch"), f"{setting.large.layers} x {setting.large.width}, {setting.steps}"

    def scratch_loss(rate: float, seed: int = 0) -> float:
        return float(shared(f"{shape}, rate {rate:.4g}, seed {seed}", partial(scratch, setting, rate, seed)))

    def grown_loss(rate: float, length: float = 0.5, seed: int = 0) -> float:
        key = f"{shape}, rate {rate:.4g}, length {length:g}, seed {seed}"
        return float(trials(key, partial(from_small, setting, method, rate, length, seed)))

    grids = tuned(
        {"scratch": scratch_loss, method: grown_loss}, {"scratch": RATE, method: RATE}, factor=2.0, least=3, most=4
    )
    rates = {name: grid.best for name, grid in grids.items()}
    each, without, details = list[float](), list[float](), list[dict[str, Any]]()
    for seed in range(setting.seeds):
        goal = scratch_loss(rates["scratch"], seed)
        length, losses = _least_length(lambda at, seed=seed: grown_loss(rates[method], at, seed), goal)
        details.append({"seed": seed, "scratch_loss": goal, "losses": losses, "length": length})
        whole = flop(setting.large, setting.steps)
        large = math.inf if length is None else flop(setting.large, length * setting.steps)
        if method == "v_cycle":
            large += flop(setting.large, FIRST * setting.steps)
        without.append(large / whole)
        each.append((large + flop(setting.small[method], SOURCE[method] * setting.steps)) / whole)
    is_found = all(math.isfinite(one) for one in each)
    return [
        Row(
            method=method,
            claim="flop to the loss of training from scratch, the small model's included; holds: below 1, every seed",
            baseline="scratch",
            ratio=round(mean(each), 4) if is_found else None,
            paper_ratio=0.8 if method == "v_cycle" else None,  # of the others the accounting is not known
            spread=(round(min(each), 4), round(max(each), 4)) if is_found else None,
            seeds=setting.seeds,
            setting=setting.told(method),
            holds=is_found and max(each) < 1,
            ratio_without_source=round(mean(without), 4) if is_found else None,
            details={
                "paper": PAPERS[method],
                "rates": {name: grid.told() for name, grid in grids.items()},
                "runs": details,
            },
        )
    ]


def _least_length(loss_at: Callable[[float], float], goal: float) -> tuple[float | None, dict[str, float]]:
    """Return the length at which the loss is `goal`, between two that were run, and their losses; None: never."""
    seen = dict[float, float]()
    order = sorted(LENGTHS)
    seen[0.5] = loss_at(0.5)
    ahead = [one for one in order if one < 0.5][::-1] if seen[0.5] <= goal else [one for one in order if one > 0.5]
    for one in ahead:
        seen[one] = loss_at(one)
        if (seen[one] <= goal) != (seen[0.5] <= goal):
            break
    told = {f"{at:g}": round(loss, 5) for at, loss in sorted(seen.items())}
    good = [at for at, loss in seen.items() if loss <= goal]
    if not good:
        return None, told
    high = min(good)
    low = max((at for at in seen if at < high), default=None)
    if low is None:
        return high, told
    part = (seen[low] - goal) / max(seen[low] - seen[high], 1e-12)
    return math.exp(math.log(low) + part * (math.log(high) - math.log(low))), told
