"""What sharded states save: the resident memory of a rank, and what a step takes, by plan.sharding.

    python benchmarks/states.py [--states none,zero1,zero2,zero3] [--alternations 3]

A GPT-2 of 56 million parameters, one sequence of 128 tokens per rank and step (so that hardly anything but model state
takes memory), AdamW, two processes on this machine, one thread each, no limit between them. `peak_mb`: the largest
resident memory of rank 0 up to its last step, with the interpreter and its libraries (`interpreter_mb`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from result import publish

STEPS, SEQUENCE, VOCABULARY = 8, 128, 8192
MODEL = {"n_embd": 768, "n_layer": 7, "n_head": 12, "n_positions": SEQUENCE, "use_cache": False}
IMPORTED = "import torch, transformers, gossamer.job.worker; print(open('/proc/self/status').read())"


def main() -> None:
    read = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    read.add_argument("--states", default="none,zero1,zero2,zero3")
    read.add_argument("--alternations", type=int, default=3)
    asked = read.parse_args()
    names = asked.states.split(",")
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        parameters = build(folder / "init")
        rounds = [{name: once(folder, name) for name in names} for _ in range(asked.alternations)]
    rows = [
        {
            "states": name,
            "peak_mb": round(median(r[name]["peak_mb"] for r in rounds)),
            "step_s": round(median(r[name]["step_s"] for r in rounds), 3),
            "step_of_whole": round(median(r[name]["step_s"] / r[names[0]]["step_s"] for r in rounds), 3),
            "loss": rounds[0][name]["loss"],
        }
        for name in names
    ]
    publish("states", {"rows": rows, "parameters": parameters, "interpreter_mb": interpreter_mb(), "ranks": 2})


def build(folder: Path) -> int:
    """Random weights, saved; how many."""
    from transformers import GPT2Config, GPT2LMHeadModel

    last = VOCABULARY - 1
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, bos_token_id=last, eos_token_id=last, **MODEL))
    model.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def once(folder: Path, states: str) -> dict[str, Any]:
    config = {
        "model": {"hf": str(folder / "init"), "config": {"use_cache": False}},
        "data": {"source": "stdlib", "tokenizer": f"bpe:{VOCABULARY}", "sequence": SEQUENCE},
        "train": {"steps": STEPS, "batch": 2, "evaluate_every": 0, "evaluate_sequences": 2, "checkpoint_every": 0},
        "machines": {"processes": 2, "threads": 1},
        "plan": {"sharding": states, "exchange": "dense"},
        "run": {"directory": str(folder), "name": states, "display": "quiet"},
    }
    (folder / "run.yaml").write_text(json.dumps(config))
    argv = [sys.executable, "-m", "gossamer", "train", str(folder / "run.yaml"), "--json"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    run = Path(json.loads(done.stdout.splitlines()[-1])["directory"])
    lines = [json.loads(line) for line in (run / "records.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    times = [b["time_s"] - a["time_s"] for a, b in pairwise(steps)]
    return {"peak_mb": steps[-1]["peak_bytes"] / 1e6, "step_s": median(times), "loss": steps[-1]["loss"]}


def interpreter_mb() -> int:
    """Resident memory of a process that has imported what a worker does, and done nothing."""
    said = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True).stdout
    return int(said.split("VmRSS:")[1].split()[0]) * 1024 // 1_000_000


if __name__ == "__main__":
    main()
