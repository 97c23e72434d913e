"""SPDF (Thangarasa et al., arXiv:2303.10464): sparse pre-training, dense fine-tuning, and its gradients on a slow link.

`loss`: pre-trained with 50 and 75 % of linear weights at 0 and fine-tuned dense on another text, against dense
pre-training on the same tokens. The paper finds no significant loss at 75 % for 1.3B parameters, and more at 50 %
for small models. `link`: bytes and seconds of a step of two hosts, by plan.exchange static_mask and by dense.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

from claims import Row, Study
from claims._grid import tuned
from claims._lm import Lm, Shape
from claims._trials import Trials
from gossamer import optimizer as optimizer_methods
from gossamer.ops.static_mask import StaticMaskDraw
from grow_shrink._byte_lm import Phase, fresh, run

SHAPE, TOKENS, SEEDS = Shape(width=64, layers=3), 2048, 3
STEPS, TUNING = 200, 80
SPARSITIES = (0.5, 0.75)
FINE_RATE = 1e-3
NEAR = 1.01  # of the dense loss


def studies(*, quick: bool) -> list[Study]:
    steps, tuning, seeds = (8, 4, 1) if quick else (STEPS, TUNING, SEEDS)
    return [
        Study("loss", partial(loss, steps, tuning, seeds), worth=3),
        Study("link", partial(link, 6 if quick else 12), "two hosts at 10 Mbit/s take minutes" if quick else "", 2),
    ]


def _rule(sparsity: float, rate: float) -> Any:
    inner = {"adamw": {"lr": rate}}
    return optimizer_methods.build({"static_mask": {"inner": inner, "sparsity": sparsity}} if sparsity else inner)


def trained(sparsity: float, rate: float, seed: int, steps: int, tuning: int) -> dict[str, Any]:
    model, rule = fresh(SHAPE, seed), _rule(sparsity, rate)
    rule.prepare(dict(model.named_parameters()))
    fine = optimizer_methods.build({"adamw": {"lr": FINE_RATE}})
    return run(model, [Phase(rule, steps), Phase(fine, tuning, "docs")], tokens=TOKENS, seed=seed)


def loss(steps: int, tuning: int, seeds: int, trials: Trials) -> list[Row]:
    def once(sparsity: float, rate: float, seed: int) -> dict[str, Any]:
        key = f"sparsity {sparsity:g}, {steps} + {tuning} steps, rate {rate:.4g}, seed {seed}"
        return trials(key, partial(trained, sparsity, rate, seed, steps, tuning))

    def score(sparsity: float) -> Callable[[float], float]:
        return lambda rate: once(sparsity, rate, 0)["loss"]

    sides = {f"{one:g}": one for one in (0.0, *SPARSITIES)}
    grids = tuned({n: score(s) for n, s in sides.items()}, dict.fromkeys(sides, 4e-3), least=3, most=4)
    found = {n: [once(s, grids[n].best, seed) for seed in range(seeds)] for n, s in sides.items()}
    model = Lm(SHAPE)
    shapes = {name: tuple(one.shape) for name, one in model.named_parameters()}
    weights = sum(one.numel() for name, one in model.named_parameters() if name != "embed.weight")
    rows = []
    for name in list(sides)[1:]:
        each = [a["loss"] / b["loss"] for a, b in zip(found[name], found["0"], strict=True)]
        before = [a["losses"][0] / b["losses"][0] for a, b in zip(found[name], found["0"], strict=True)]
        draw = StaticMaskDraw(sparsity=sides[name], seed=0)
        zeros = sum(one.numel() - draw.kept_count(n, shapes[n]) for n, one in model.named_parameters())
        rows.append(
            Row(
                method=f"spdf at {name}",
                claim=f"loss after dense fine-tuning at equal tokens; holds: at most {NEAR}",
                baseline="dense pre-training and fine-tuning",
                ratio=round(mean(each), 5),
                paper_ratio=None,
                spread=(round(min(each), 5), round(max(each), 5)),
                seeds=seeds,
                setting=f"byte LM of {SHAPE.layers} layers of {SHAPE.width}, {steps} steps of {TOKENS} tokens of "
                f"source, {tuning} of prose",
                holds=mean(each) <= NEAR,
                details={
                    "loss_ratio_before_fine_tuning": round(mean(before), 5),
                    "flop_share_of_pre_training_without_attention": round(1 - zeros / weights, 4),
                    "rates": {n: one.told() for n, one in grids.items()},
                    "losses": {n: [one["losses"] for one in each] for n, each in found.items()},
                },
            )
        )
    return rows


CONFIG: dict[str, Any] = {
    "model": {
        "hf": "llama",
        "config": {
            "vocab_size": 257,
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
        },
    },
    "data": {"source": "stdlib", "tokenizer": "byte", "sequence": 64},
    "run": {"display": "plain"},
}


def link(steps: int, trials: Trials) -> list[Row]:
    one = {s: trials(f"two hosts at 10 Mbit/s, sparsity {s:g}", partial(measured, s, steps)) for s in (0, *SPARSITIES)}
    rows = []
    for sparsity in SPARSITIES:
        wanted = round(one[0]["matrix_bytes"] * (1 - sparsity)) + one[0]["other_bytes"]
        ratio = one[sparsity]["bytes"] / one[0]["bytes"]
        rows.append(
            Row(
                method=f"exchange static_mask at {sparsity:g}",
                claim="bytes of a step; holds: 1 - sparsity of masked matrices and all of the rest, to the byte; "
                "seconds in details",
                baseline="dense",
                ratio=round(ratio, 5),
                paper_ratio=None,
                seeds=1,
                setting="two hosts, 10 Mbit/s, Llama-like model of 0.92 M parameters, float32",
                holds=one[sparsity]["bytes"] == wanted,
                details={
                    "seconds_ratio": round(one[sparsity]["step_s"] / one[0]["step_s"], 4),
                    "step_s": {f"{s:g}": found["step_s"] for s, found in one.items()},
                    "bytes": {f"{s:g}": found["bytes"] for s, found in one.items()},
                },
            )
        )
    return rows


def measured(sparsity: float, steps: int) -> dict[str, Any]:
    """Return the bytes of a step from host 0, and the median of its seconds on both hosts of an emulated link."""
    mask = {"sparsity": sparsity}
    optimizer: Any = {"static_mask": mask} if sparsity else "adamw"
    exchange: Any = {"static_mask": mask} if sparsity else "dense"
    train = {"batch": 8, "steps": steps, "evaluate_every": 0, "checkpoint_every": 0, "optimizer": optimizer}
    with tempfile.TemporaryDirectory() as folder:
        config = {**CONFIG, "train": train, "plan": {"exchange": exchange}}
        config["run"] = {**CONFIG["run"], "directory": folder, "name": "link"}
        file = Path(folder, "link.yaml")
        file.write_text(json.dumps(config))
        gossamer = [sys.executable, "-m", "gossamer"]
        lab = [*gossamer, "lab", "run", "--hosts", "2", "--rate", "10mbit", "--json", "--"]
        argv = [*lab, *gossamer, "train", str(file)]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(argv, capture_output=True, text=True, env=environ, timeout=900)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        (directory,) = Path(folder).glob("*link/")
        records = [json.loads(line) for line in (directory / "records.jsonl").read_text().splitlines()]
    seen = [one for one in records if one["kind"] == "step"][1:]
    draw = StaticMaskDraw(sparsity=0.5, seed=0)
    shapes = {f"layers.{layer}.{n}.weight": s for layer in range(4) for n, s in _LAYER.items()}
    matrices = sum(4 * a * b for name, (a, b) in shapes.items() if draw.covers(name, (a, b)))
    sent = median(sum(one["wire_bytes"].values()) for one in seen)
    return {
        "bytes": sent,
        "step_s": median(one["step_s"] for one in seen),
        "matrix_bytes": matrices,
        "other_bytes": sent - matrices if not sparsity else None,
    }


_LAYER = {
    **{f"self_attn.{n}_proj": (128, 128) for n in "qkvo"},
    "mlp.gate_proj": (384, 128),
    "mlp.up_proj": (384, 128),
    "mlp.down_proj": (128, 384),
}
