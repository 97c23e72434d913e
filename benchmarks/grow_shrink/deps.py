"""DepS (arXiv:2407.06167): once-for-all training that shrinks late. Where is the optimum of the start?

The paper's curve has it near half of the training. Here: digits of scikit-learn (1,000 to train, 397 to tune, 400 to
report), residual blocks of 3 widths x 2 depths, starts at 0, 25, 50 and 75 % of the steps, each with a rate tuned on a
grid of the same size. A ratio is of test losses, averaged over the largest, the middle and the smallest subnet: that of
a start at 50 % over that of the other start. Batch norms of every subnet are calibrated again.
"""

from __future__ import annotations

from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from claims import Row, Study
from claims._grid import tuned
from claims._lm import rate_at
from claims._trials import Trials
from gossamer import loss as losses_
from gossamer import optimizer as optimizer_methods
from gossamer.model.deps_supernet import DepsSupernet
from gossamer.model.elastic import recalibrate

STARTS, SEEDS, STEPS, ROWS, RATE = (0.0, 0.25, 0.5, 0.75), 5, 400, 64, 1.6e-2
WIDTH, HIDDEN, BLOCKS = 16, 32, 2
SHARES = {"largest": (1.0, 1.0), "middle": (0.5, 1.0), "smallest": (0.25, 0.5)}


def studies(*, quick: bool) -> list[Study]:
    return [Study("start", partial(start, 60 if quick else STEPS, 2 if quick else SEEDS))]


def start(steps: int, seeds: int, trials: Trials) -> list[Row]:
    def run(share: float, rate: float, seed: int) -> dict[str, Any]:
        key = f"start {share:g}, {steps} steps, rate {rate:.4g}, seed {seed}"
        return trials(key, partial(losses, share, rate, steps, seed))

    def held_out(share: float, rate: float) -> float:
        return mean(run(share, rate, 0)["tune"].values())

    grids = tuned(
        {f"{share:g}": partial(held_out, share) for share in STARTS},
        {f"{share:g}": RATE for share in STARTS},
        factor=2.0,
        least=3,
        most=5,
    )
    found = {f"{share:g}": [run(share, grids[f"{share:g}"].best, seed) for seed in range(seeds)] for share in STARTS}
    means = {name: [mean(one["test"].values()) for one in runs] for name, runs in found.items()}
    rows = []
    for other in ("0", "0.25", "0.75"):
        each = [ours / theirs for ours, theirs in zip(means["0.5"], means[other], strict=True)]
        rows.append(
            Row(
                method="deps",
                claim="mean test loss of three subnets with a start at 50 %; holds: below 1 on average",
                baseline=f"a start at {float(other):.0%}",
                ratio=round(mean(means["0.5"]) / mean(means[other]), 4),
                paper_ratio=None,
                spread=(round(min(each), 4), round(max(each), 4)),
                seeds=seeds,
                setting=f"digits, {BLOCKS} residual blocks of {WIDTH} and {HIDDEN} hidden features, {steps} steps of "
                f"{ROWS} rows, AdamW tuned on {len(grids['0.5'].tried)} rates each",
                holds=mean(means["0.5"]) < mean(means[other]),
                details={
                    name: {
                        subnet: {figure: mean(one[figure][subnet] for one in runs) for figure in ("test", "errors")}
                        for subnet in SHARES
                    }
                    | {"rates": grids[name].told()}
                    for name, runs in found.items()
                },
            )
        )
    return rows


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = nn.Linear(WIDTH, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH)
        self.stack = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.stack(x)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(64, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


@cache
def digits() -> dict[str, tuple[Tensor, Tensor]]:
    """Return the rows and labels of each part, in an order drawn once."""
    package = find_spec("sklearn")  # pip install scikit-learn, whose file is enough: it is not imported
    if package is None or package.origin is None:
        raise ModuleNotFoundError("scikit-learn, whose digits this study reads")
    data = np.loadtxt(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    x, y = torch.tensor(data[:, :-1], dtype=torch.float32) / 16, torch.tensor(data[:, -1], dtype=torch.long)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    parts = {"train": order[:1000], "tune": order[1000:1397], "test": order[1397:]}
    return {name: (x[one], y[one]) for name, one in parts.items()}


def losses(share: float, rate: float, steps: int, seed: int) -> dict[str, Any]:
    """Train a supernet; return losses and error rates of its subnets on the two parts that it did not see."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    x, y = digits()["train"]
    supernet = DepsSupernet(Network(), steps=steps, start=share, least_width=0.25, least_depth=0.5).train()
    objective = losses_.build("deps")
    params = dict(supernet.named_parameters())
    values = {name: p.detach() for name, p in params.items()}
    rule = optimizer_methods.build({"adamw": {"lr": rate}})
    state, drawn = rule.init(values), torch.Generator().manual_seed(100 + seed)
    for step in range(steps):
        rows = torch.randint(0, len(x), (ROWS,), generator=drawn)
        supernet.begin_step(seed, step)
        value = objective(supernet(x[rows]), {"labels": y[rows]})
        grads = torch.autograd.grad(value, list(params.values()))
        rule.update(values, dict(zip(params, grads, strict=True)), state, lr_scale=rate_at(step, steps), step=step)
    found: dict[str, Any] = {"tune": {}, "test": {}, "errors": {}}
    for name, (width, depth) in SHARES.items():
        alone = supernet.elastic.extract(supernet.elastic.at([width] * BLOCKS, [depth])).eval()
        recalibrate(alone, [{"x": x}])
        for part in ("tune", "test"):
            rows_, labels = digits()[part]
            with torch.no_grad():
                logits = alone(rows_)
            found[part][name] = float(cross_entropy(logits, labels))
        found["errors"][name] = float((logits.argmax(-1) != labels).float().mean())
    return found
