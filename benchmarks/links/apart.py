"""The loss of islands that train apart: `gossamer train` itself, a process per rank on this machine.

Lockstep cannot stand for them, as what is under way goes beside the steps. The model begins with the same numbers, sees
the same sequences in the same order and is judged on the same ones as in lockstep; its update rule is the same.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from links import setting, venvs

_EVALUATIONS, _EVALUATED = 20, 64  # on the way; sequences
_COMMON_SEED, _COMMON_LR = 1000, 5e-4  # the order of sequences before the studies': none of theirs


def train(study: Any, judge: Callable[[nn.Module], float]) -> dict[str, Any]:
    """As `losses.train`; the losses on the way are the run's own, of the anchor, on its first validation sequences."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        run = _trained(study, folder)
        lines = [json.loads(line) for line in (run / "records.jsonl").read_text().splitlines()]
        final = judge(_loaded(folder / "end").eval())
    each = setting.tokens(study.hosts)
    curve = [[line["step"] * each, line["loss"]] for line in lines if line["kind"] == "evaluation"]
    sent = [sum(line["wire_bytes"].values()) for line in lines if line["kind"] == "step"]
    seconds = time.perf_counter() - began
    return {"curve": curve, "final": final, "sent_bytes": sum(sent), "seconds": seconds, "device": "cpu"}


def begun(study: Any) -> nn.Module:
    """The model that a study begins with. Raises FileNotFoundError where `common` was not made."""
    return _loaded(_common_folder(study)).train() if study.after else setting.module(study.model, study.seed)


def common(study: Any) -> None:
    """Make the weights that studies like this one begin with, where they are not there: float32 gradients that meet at
    every step, from random weights, at a rate that is not lowered: what has been cooled down learns little afterwards.
    """
    if not study.after or _common_folder(study).exists():
        return
    given = {"seed": _COMMON_SEED, "lr": _COMMON_LR, "tokens": study.after, "beta2": setting.BETAS[1]}
    first = replace(study, after=0, exchange="dense", sync="every_step", **given)
    _common_folder(study).parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_common_folder(study).parent) as text:
        _trained(first, Path(text), lr_schedule="constant")
        (Path(text) / "end").rename(_common_folder(study))


def _common_folder(study: Any) -> Path:
    return venvs.folder() / f"common_{study.hosts}x{study.after}_{study.precision}_{_COMMON_LR:g}_constant"


def _loaded(folder: Path) -> nn.Module:
    from transformers import GPT2LMHeadModel

    found: nn.Module = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32)
    return found


def _trained(study: Any, folder: Path, *, schedule: str = "cosine") -> Path:
    """The run's directory; its model is in `folder`/end."""
    begun(study).save_pretrained(folder / "init")  # type: ignore[operator]
    (folder / "run.yaml").write_text(json.dumps(_config(study, folder, schedule)))
    run = Path(_gossamer("train", str(folder / "run.yaml"), folder=folder)["directory"])
    _gossamer("export", str(run), "--to", "hf", str(folder / "end"), folder=folder)
    return run


def _config(study: Any, folder: Path, schedule: str) -> dict[str, Any]:
    steps = max(2, math.ceil(study.tokens / setting.tokens(study.hosts)))
    rule = {"lr": study.lr, "betas": (setting.BETAS[0], study.beta2), "weight_decay": setting.WEIGHT_DECAY}
    train = {
        "steps": steps,
        "batch": study.hosts * setting.ROWS,
        "optimizer": {"adamw": rule},
        "lr_schedule": {schedule: {"warmup": 0.05}},
        "max_grad_norm": setting.CLIP,
        "precision": study.precision,
        "seed": study.seed,
        "evaluate_every": max(1, steps // _EVALUATIONS),
        "evaluate_sequences": _EVALUATED,
        "checkpoint_every": 0,
    }
    machines: dict[str, Any] = {"processes": study.hosts, "threads": 1, "timeout_s": 3600.0, "heartbeat_s": 3600.0}
    if study.islands:
        ends = [sum(study.islands[:i]) for i in range(len(study.islands) + 1)]
        machines["islands"] = [list(range(a, b)) for a, b in pairwise(ends)]
    return {
        "model": {"hf": str(folder / "init"), "config": {"use_cache": False}},
        "data": setting.DATA,
        "train": train,
        "machines": machines,
        "plan": {"exchange": study.exchange, "sync": study.sync},
        "run": {"directory": str(folder), "name": "run", "display": "quiet"},
    }


def _gossamer(*argv: str, folder: Path) -> dict[str, Any]:
    """What it says in its last line."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(
        [sys.executable, "-m", "gossamer", *argv, "--json"], env=env, cwd=folder, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"gossamer {argv[0]} ended with {done.returncode}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
