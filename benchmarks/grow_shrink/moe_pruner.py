"""MoE-Pruner (Xie et al. 2024, arXiv:2410.12013): router weights in scores of experts, and expert-wise distillation.

A byte LM with a mixture of experts is trained here and pruned by magnitude, Wanda and MoE-Pruner, with calibration
texts of several seeds. Then each recovers with the masks held, in as many steps: by
    L = CE + lambda sum_layers sum_experts MSE(E_teacher(x), E_student(x)),
x being what the student's router sends to an expert, the teacher the model before pruning, lambda such that both terms
are equal at the first step; or by CE alone. The paper's models are of 47B parameters, and its figures are accuracies:
none is in this unit.

Study `by_block` looks for the cause of what `one_shot` finds: what it is worth that blocks are pruned one after the
other, each on the inputs that pruned blocks give, as Wanda's paper and `gossamer prune` do; what each kind of layer
does alone; how unequal input features are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import cache, partial
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, rms_norm, scaled_dot_product_attention

from claims import Row, Study
from claims._grid import tuned
from claims._trials import Trials
from gossamer.prune import apply_masks, expert_distances, prune
from gossamer.prune import build as pruning
from grow_shrink._pruning import (
    CALIBRATION,
    CONTEXT,
    ROWS,
    TUNING_SEED,
    calibration,
    copied,
    held_loss,
    kept_model,
    mean_loss,
    stepped,
    zeros_kept,
)

WIDTH, LAYERS, HEADS, EXPERTS, CHOSEN, INNER = 64, 3, 4, 8, 2, 128
DENSE_STEPS, DENSE_RATE, STEPS, SEEDS = 500, 4e-3, 40, 3
BALANCE = 0.01  # of the usual loss for equal use of experts, while the dense model is trained
SPARSITIES, NAMES = (0.5, 0.6, 0.7), ("magnitude", "wanda", "moe_pruner")
RATE = 1e-3


def studies(*, quick: bool) -> list[Study]:
    given = (30, 6, 1) if quick else (DENSE_STEPS, STEPS, SEEDS)
    return [
        Study("one_shot", partial(one_shot, given[0], given[2]), worth=50),
        Study("by_block", partial(by_block, given[0], given[2]), worth=48),
        Study("distillation", partial(distillation, *given), worth=45),
    ]


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(gelu(self.up(x)))
        return found


class Mixture(nn.Module):
    """The best two of eight experts for each token, by router weights that are normalized over the chosen ones."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.imbalance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        chances = self.router(flat).softmax(-1)
        best = chances.topk(CHOSEN, -1)
        weights = best.values / best.values.sum(-1, keepdim=True)
        used = torch.zeros_like(chances).scatter(1, best.indices, 1.0)
        if self.training:
            self.imbalance = EXPERTS / CHOSEN * (used.mean(0) * chances.mean(0)).sum()
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(best.indices == number)
            out = out.index_add(0, rows, expert(flat[rows]) * weights[rows, place, None])
        return out.view(x.shape)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.moe = Mixture()

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(rms_norm(x, (width,), self.norm1)).view(rows, length, 3, HEADS, -1).transpose(1, 3).unbind(2)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.moe(rms_norm(x, (width,), self.norm2))


class MoeLm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.place.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(rms_norm(x, (WIDTH,), self.norm))
        return found


def logits(module: nn.Module, ids: Tensor) -> Tensor:
    found: Tensor = module(ids)
    return found


@cache
def dense(steps: int) -> nn.Module:
    torch.manual_seed(0)
    module = MoeLm()

    def objective(rows: Tensor) -> Tensor:
        loss = mean_loss(module(rows[:, :-1]), rows)
        return loss + BALANCE * sum(block.moe.imbalance for block in module.blocks)  # type: ignore[union-attr]

    def train() -> None:
        stepped(module, objective, rate=DENSE_RATE, steps=steps, seed=10_000)
        for block in module.blocks:
            block.moe.imbalance = torch.zeros(())  # type: ignore[union-attr]  (it has a graph, which is not copied)

    size = f"{LAYERS} x {WIDTH}, {EXPERTS} of {INNER}"
    return kept_model(f"moe {size}, {steps} steps at {DENSE_RATE:g}", module, train)


@cache
def shrunk(
    dense_steps: int, name: str, seed: int, sparsity: float = SPARSITIES[0]
) -> tuple[nn.Module, Mapping[str, Tensor]]:
    """Return the model pruned with the calibration text of a seed, and its masks."""
    module = copied(dense(dense_steps)).eval()
    masks = prune(module, pruning({name: {"sparsity": sparsity}}), calibration(module, logits, seed)).masks
    apply_masks(module, masks)
    return module, masks


def one_shot(dense_steps: int, seeds: int, trials: Trials) -> list[Row]:
    rows = []
    for sparsity in SPARSITIES:
        found, whole = pruned_losses(dense_steps, seeds, trials, sparsity)
        for name, other in (("moe_pruner", "wanda"), ("moe_pruner", "magnitude"), ("wanda", "magnitude")):
            pairs = [(a - whole) / (b - whole) for a, b in zip(found[name], found[other], strict=True)]
            rows.append(
                Row(
                    method=name,
                    claim="rise of the loss by pruning, without retraining; holds: below 1 with every calibration seed",
                    baseline=other,
                    ratio=round(mean(pairs), 4),
                    paper_ratio=None,
                    spread=(round(min(pairs), 4), round(max(pairs), 4)),
                    seeds=seeds,
                    setting=setting(dense_steps, sparsity),
                    holds=max(pairs) < 1,
                    details={"loss_dense": whole, name: found[name], other: found[other]},
                )
            )
    return rows


def pruned_losses(
    dense_steps: int, seeds: int, trials: Trials, sparsity: float = SPARSITIES[0]
) -> tuple[dict[str, list[float]], float]:
    """Return the losses after pruning by method and calibration seed, and that before."""
    shared = trials.of("one_shot")
    more = "" if sparsity == SPARSITIES[0] else f", sparsity {sparsity:g}"
    whole = shared(f"dense, {dense_steps} steps", lambda: held_loss(dense(dense_steps), logits))
    return {
        name: [
            shared(
                f"{name}, {dense_steps} steps, calibration {seed}{more}",
                lambda name=name, seed=seed: held_loss(shrunk(dense_steps, name, seed, sparsity)[0], logits),
            )
            for seed in range(seeds)
        ]
        for name in NAMES
    }, whole


def by_block(dense_steps: int, seeds: int, trials: Trials) -> list[Row]:
    looked = trials(f"kinds, {dense_steps} steps", lambda: kinds(dense_steps))
    rows = []
    for sparsity in SPARSITIES:
        found, whole = pruned_losses(dense_steps, seeds, trials, sparsity)
        for name in NAMES[1:]:
            together = [
                trials(
                    f"{name} in one pass, {dense_steps} steps, calibration {seed}, sparsity {sparsity:g}",
                    lambda name=name, seed=seed, sparsity=sparsity: shrunk_at_once(dense_steps, name, seed, sparsity),
                )
                for seed in range(seeds)
            ]
            pairs = [(a - whole) / (b - whole) for a, b in zip(found[name], together, strict=True)]
            rows.append(
                Row(
                    method=f"{name} by block",
                    claim="rise of the loss with the inputs that pruned blocks give; holds: below 1 with every seed",
                    baseline=f"{name} with the inputs of the model before",
                    ratio=round(mean(pairs), 4),
                    paper_ratio=None,
                    spread=(round(min(pairs), 4), round(max(pairs), 4)),
                    seeds=seeds,
                    setting=setting(dense_steps, sparsity),
                    holds=max(pairs) < 1,
                    details={
                        "loss_dense": whole,
                        "by_block": found[name],
                        "one_pass": together,
                        "magnitude": found["magnitude"],
                        **(looked if sparsity == SPARSITIES[0] and name == "wanda" else {}),
                    },
                )
            )
    return rows


def shrunk_at_once(dense_steps: int, name: str, seed: int, sparsity: float) -> float:
    """Prune all blocks on what those of the model before give; return the loss."""
    module, masks = copied(dense(dense_steps)).eval(), dict[str, Tensor]()
    for block in range(LAYERS):
        wanted = {"sparsity": sparsity, "include": [rf"^blocks\.{block}\.(qkv|out|moe\.experts)"]}
        masks |= prune(module, pruning({name: wanted}), calibration(module, logits, seed)).masks
    apply_masks(module, masks)
    return held_loss(module, logits)


@torch.no_grad()
def kinds(dense_steps: int) -> dict[str, dict[str, Any]]:
    """Return, by kind of layer at the first sparsity: errors of outputs relative to them, the loss with this kind alone
    pruned, and the largest norm of an input feature beside the median.
    """
    module, reached = copied(dense(dense_steps)).eval(), dict[str, list[Tensor]]()
    masks = {name: shrunk(dense_steps, name, 0)[1] for name in NAMES}
    for path, layer in module.named_modules():
        if f"{path}.weight" in masks["wanda"]:
            layer.register_forward_pre_hook(lambda _, args, path=path: reached.setdefault(path, []).append(args[0]))
    for forward in calibration(module, logits, 0):
        forward()
    found: dict[str, dict[str, Any]] = {"output_errors": {}, "losses_alone": {}, "feature_norms": {}}
    for kind in ("qkv", "out", "up", "down"):
        paths = [path for path in reached if path.endswith(f".{kind}")]
        inputs = {path: torch.cat([one.flatten(0, -2) for one in reached[path]]) for path in paths}
        spreads = [norms.max() / norms.median() for norms in (one.norm(dim=0) for one in inputs.values())]
        found["feature_norms"][kind] = round(float(max(spreads)), 3)
        found["output_errors"][kind], found["losses_alone"][kind] = {}, {}
        for name in NAMES:
            errors = []
            for path, x in inputs.items():
                weight = dense(dense_steps).get_parameter(f"{path}.weight")
                lost = weight.masked_fill(masks[name][f"{path}.weight"], 0.0)
                errors.append(float((x @ lost.t()).norm() / (x @ weight.t()).norm()))
            alone = copied(dense(dense_steps)).eval()
            apply_masks(alone, {f"{path}.weight": masks[name][f"{path}.weight"] for path in paths})
            found["output_errors"][kind][name] = round(mean(errors), 4)
            found["losses_alone"][kind][name] = held_loss(alone, logits)
    return found


def setting(dense_steps: int, sparsity: float = SPARSITIES[0]) -> str:
    parameters = sum(one.numel() for one in MoeLm().parameters())
    return (
        f"byte LM of {LAYERS} layers of {WIDTH} with {EXPERTS} experts of {INNER}, {CHOSEN} chosen, {parameters:,} "
        f"parameters, {dense_steps} steps of {ROWS * CONTEXT:,} tokens; {sparsity:.0%} of each row of experts and "
        f"attention; {CALIBRATION} calibration sequences of {CONTEXT} bytes"
    )


def recovered(dense_steps: int, steps: int, name: str, way: str, rate: float, seed: int) -> dict[str, Any]:
    """Recover a pruned model with the masks held; `way`: experts, or loss (alone)."""
    source, masks = shrunk(dense_steps, name, seed % TUNING_SEED)
    module, teacher = copied(source).train(), copied(dense(dense_steps)).eval().requires_grad_(False)
    weight: list[float] = []
    with ExitStack() as stack:
        distance = stack.enter_context(expert_distances(module, teacher)) if way == "experts" else None

        def objective(rows: Tensor) -> Tensor:
            loss = mean_loss(module(rows[:, :-1]), rows)
            if distance is None:
                return loss
            apart = distance()
            if not weight:
                weight.append(float(loss.detach()) / max(float(apart.detach()), 1e-12))
            return loss + weight[0] * apart

        found = stepped(module, objective, rate=rate, steps=steps, seed=seed, masks=masks)
    return {"loss": held_loss(module, logits), **found, "lambda": weight, "zeros_kept": zeros_kept(module, masks)}


def distillation(dense_steps: int, steps: int, seeds: int, trials: Trials) -> list[Row]:
    sides = {f"{name}, {way}": (name, way) for name in NAMES for way in ("experts", "loss")}

    def once(side: str, rate: float, seed: int) -> dict[str, Any]:
        key = f"{side}, {dense_steps} + {steps} steps, rate {rate:.4g}, seed {seed}"
        found: dict[str, Any] = trials(key, lambda: recovered(dense_steps, steps, *sides[side], rate, seed))
        return found

    def score(side: str) -> Callable[[float], float]:
        return lambda rate: float(once(side, rate, TUNING_SEED)["loss"])

    grids = tuned({side: score(side) for side in sides}, dict.fromkeys(sides, RATE), least=3, most=4)
    pruned, whole = pruned_losses(dense_steps, seeds, trials)
    found = {side: [once(side, grids[side].best, seed) for seed in range(seeds)] for side in sides}
    rows = []
    pairs = [(f"{name}, experts", f"{name}, loss") for name in NAMES]
    pairs += [("moe_pruner, experts", f"{other}, experts") for other in ("wanda", "magnitude")]
    for one, other in pairs:
        ratios = [a["loss"] / b["loss"] for a, b in zip(found[one], found[other], strict=True)]
        rows.append(
            Row(
                method=one.replace(", experts", " with expert-wise distillation"),
                claim="loss after recovery with the masks held, in as many steps; holds: below 1 with every seed",
                baseline=other.replace(", experts", " with it").replace(", loss", " with the loss alone"),
                ratio=round(mean(ratios), 5),
                paper_ratio=None,
                spread=(round(min(ratios), 5), round(max(ratios), 5)),
                seeds=seeds,
                setting=f"{setting(dense_steps)}; {steps} steps of recovery",
                holds=max(ratios) < 1 and all(run["zeros_kept"] for run in (*found[one], *found[other])),
                details={
                    "loss_dense": whole,
                    "loss_pruned": {side: pruned[sides[side][0]] for side in (one, other)},
                    "losses": {side: [run["loss"] for run in found[side]] for side in (one, other)},
                    "seconds": {side: round(mean(run["seconds"] for run in found[side]), 2) for side in (one, other)},
                    "rates": {side: grids[side].told() for side in (one, other)},
                },
            )
        )
    return rows
