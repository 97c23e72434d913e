"""PERP (Zimmer et al. 2023, arXiv:2312.15230): a pruned model recovers by training a few parameters.

A byte GPT-2 is trained, pruned by magnitude, and trained on for some steps: all weights that were kept, or MaskLoRA or
ScaleLoRA with biases and norms, or biases and norms alone. The paper recovers OPT-2.7B to 30B with 0.3 % of the
parameters "near" full retraining; it has no figure in this unit, the share that is recovered of what full retraining
recovers in as many steps.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache, partial
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from claims import Row, Study
from claims._grid import tuned
from claims._trials import Trials
from gossamer.model.adapter import adapt, build, merge
from gossamer.prune import apply_masks, prune
from gossamer.prune import build as pruning
from grow_shrink._pruning import (
    CONTEXT,
    ROWS,
    TUNING_SEED,
    copied,
    held_loss,
    kept_model,
    mean_loss,
    stepped,
    zeros_kept,
)

CONFIG: dict[str, Any] = {
    "n_embd": 96,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": CONTEXT,
    "vocab_size": 256,
    "bos_token_id": None,
    "eos_token_id": None,
}
DENSE_STEPS, DENSE_RATE, STEPS, SEEDS = 600, 4e-3, 50, 3
SPARSITIES = (0.5, 0.6, 0.7)
RANK = 4  # of a width of 96; the paper's is 16
FEW = r"bias$|ln_"  # biases and norms
STARTS = {"full": 1e-3, "mask_lora": 4e-3, "scale_lora": 4e-3, "biases_and_norms": 8e-3}
ADAPTERS: dict[str, Any] = {
    "mask_lora": {"mask_lora": {"rank": RANK, "mask": "nonzero", "targets": ["c_"]}},
    "scale_lora": {"scale_lora": {"rank": RANK, "targets": ["c_"]}},
}
NEAR = 0.9


def studies(*, quick: bool) -> list[Study]:
    given = (30, 6, (0.6,), 1) if quick else (DENSE_STEPS, STEPS, SPARSITIES, SEEDS)
    return [Study("recovery", partial(recovery, *given), worth=60)]


def logits(module: nn.Module, ids: Tensor) -> Tensor:
    found: Tensor = module(input_ids=ids, use_cache=False).logits
    return found


@cache
def dense(steps: int) -> nn.Module:
    """Return the trained model."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    module: nn.Module = GPT2LMHeadModel(GPT2Config(**CONFIG, **off))

    def train() -> None:
        stepped(
            module,
            lambda rows: mean_loss(logits(module, rows[:, :-1]), rows),
            rate=DENSE_RATE,
            steps=steps,
            seed=10_000,
        )

    size = f"{CONFIG['n_layer']} x {CONFIG['n_embd']}"
    return kept_model(f"perp {size}, {steps} steps at {DENSE_RATE:g}", module, train)


@cache
def shrunk(dense_steps: int, sparsity: float) -> tuple[nn.Module, Mapping[str, Tensor]]:
    module = copied(dense(dense_steps))
    masks = prune(module, pruning({"magnitude": {"sparsity": sparsity}})).masks
    apply_masks(module, masks)
    return module, masks


def recovered(dense_steps: int, steps: int, sparsity: float, how: str, rate: float, seed: int) -> dict[str, Any]:
    """Train a pruned model on; return the loss, seconds, trained parameters, and whether its zeros are there."""
    source, masks = shrunk(dense_steps, sparsity)
    module = copied(source).train()
    if how in ADAPTERS:
        adapter = build(ADAPTERS[how])
        adapt(module, adapter, seed)
        adapter.place_masks(module, None, None)
    for name, one in module.named_parameters():
        few = re.search(FEW, name) is not None
        one.requires_grad_(how == "full" or few or (how in ADAPTERS and "lora" in name))
    found = stepped(
        module,
        lambda rows: mean_loss(logits(module, rows[:, :-1]), rows),
        rate=rate,
        steps=steps,
        seed=seed,
        masks=masks if how == "full" else None,
    )
    before = held_loss(module, logits) if how in ADAPTERS else None
    merge(module)
    loss = held_loss(module, logits)
    assert before is None or abs(before - loss) < 1e-4, "merging changed the model"
    return {"loss": loss, **found, "zeros_kept": zeros_kept(module, masks)}


def recovery(dense_steps: int, steps: int, sparsities: tuple[float, ...], seeds: int, trials: Trials) -> list[Row]:
    size = f"{dense_steps} + {steps} steps"

    def once(how: str, sparsity: float, rate: float, seed: int) -> dict[str, Any]:
        key = f"{how}, {size}, sparsity {sparsity:g}, rate {rate:.4g}, seed {seed}"
        given = (dense_steps, steps, sparsity, how, rate, seed)
        found: dict[str, Any] = trials(key, lambda: recovered(*given))
        return found

    def score(how: str, sparsity: float) -> Any:
        return lambda rate: once(how, sparsity, rate, TUNING_SEED)["loss"]

    whole = trials(f"dense, {size}", lambda: held_loss(dense(dense_steps), logits))
    parameters = sum(one.numel() for one in dense_parameters())
    model = f"byte GPT-2 of {CONFIG['n_layer']} layers of {CONFIG['n_embd']}, {parameters:,} parameters"
    rows = []
    middle = sparsities[len(sparsities) // 2]
    grids = tuned({how: score(how, middle) for how in STARTS}, STARTS, least=3, most=4)
    for sparsity in sparsities:
        pruned = trials(
            f"pruned, {size}, sparsity {sparsity:g}", lambda s=sparsity: held_loss(shrunk(dense_steps, s)[0], logits)
        )
        found = {how: [once(how, sparsity, grids[how].best, seed) for seed in range(seeds)] for how in STARTS}
        for how in [how for how in STARTS if how != "full"]:
            shares = [
                (pruned - one["loss"]) / (pruned - other["loss"])
                for one, other in zip(found[how], found["full"], strict=True)
            ]
            seconds = [mean(one["seconds"] for one in found[side]) for side in (how, "full")]
            rows.append(
                Row(
                    method=how,
                    claim=f"share of the loss that full retraining recovers in as many steps; holds: {NEAR:g} and more "
                    "with every seed, zeros kept bit for bit",
                    baseline="retraining of all kept weights",
                    ratio=round(mean(shares), 4),
                    paper_ratio=None,
                    spread=(round(min(shares), 4), round(max(shares), 4)),
                    seeds=seeds,
                    setting=f"{model}; sparsity {sparsity:g} by magnitude; {size} of {ROWS * CONTEXT:,} tokens; "
                    f"rank {RANK}; rates tuned at {middle:g}",
                    holds=min(shares) >= NEAR and all(one["zeros_kept"] for one in found[how]),
                    details={
                        "loss_dense": whole,
                        "loss_pruned": pruned,
                        "losses": [one["loss"] for one in found[how]],
                        "losses_full": [one["loss"] for one in found["full"]],
                        "parameters": found[how][0]["parameters"],
                        "parameters_full": found["full"][0]["parameters"],
                        "seconds": round(seconds[0], 2),
                        "seconds_ratio": round(seconds[0] / seconds[1], 3),
                        "rates": {side: grids[side].told() for side in (how, "full")},
                    },
                )
            )
    return rows


def dense_parameters() -> list[nn.Parameter]:
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        return list(GPT2LMHeadModel(GPT2Config(**CONFIG)).parameters())
