"""Whether `gossamer train --dry-run` tells the memory that a run then takes, for settings of every kind.

    python benchmarks/fit.py [--only gpt2,zero2]

Every row: a dry run, then the run itself on this machine (6 steps, a checkpoint after 3, one thread a process). `told`
is the dry run's peak of rank 0, `taken` the largest resident memory of rank 0 up to its last step, `error` their ratio
less 1. `fits` compares a copy of the largest row with a batch that this machine cannot hold.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from result import publish

Sections = Mapping[str, Any]
GPT2 = {"vocab_size": 8192, "n_embd": 512, "n_layer": 6, "n_head": 8, "n_positions": 256}
WIDE = {**GPT2, "n_embd": 768}
LLAMA = {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
LARGE = {**LLAMA, "hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12, "num_key_value_heads": 4}


def settings(
    model: str,
    config: Sections,
    *,
    batch: int,
    processes: int = 1,
    sequence: int = 256,
    plan: Sections | None = None,
    train: Sections | None = None,
    **beside: Any,
) -> dict[str, Any]:
    return {
        "model": {"hf": model, "config": dict(config), **beside},
        "data": {"source": "stdlib", "tokenizer": "byte", "sequence": sequence},
        "train": {
            "steps": 6,
            "batch": batch,
            "evaluate_every": 0,
            "evaluate_sequences": 2,
            "checkpoint_every": 3,
            "prove": "never",  # what it takes is given back, and it is left out where it does not fit
            **(train or {}),
        },
        "machines": {"processes": processes, "threads": 1},
        "plan": {"exchange": "dense", **(plan or {})},
        "run": {"display": "quiet"},
    }


CASES = {
    "gpt2": settings("gpt2", GPT2, batch=4),
    "llama, 2 replicas": settings("llama", LLAMA, batch=4, processes=2, sequence=512),
    "large vocabulary": settings("llama", {**LLAMA, "vocab_size": 32000}, batch=4),
    "adapter": settings("llama", LARGE, batch=4, adapter="lora"),
    "zero1": settings("gpt2", WIDE, batch=2, processes=2, plan={"sharding": "zero1"}),
    "zero2": settings("gpt2", WIDE, batch=2, processes=2, plan={"sharding": "zero2"}),
    "zero3": settings("gpt2", WIDE, batch=2, processes=2, plan={"sharding": "zero3"}),
    "2 stages": settings("llama", LLAMA, batch=8, processes=2, sequence=512, plan={"mesh": {"pipe": 2}}),
    "islands (diloco)": settings("llama", LARGE, batch=2, processes=2, plan={"sync": "diloco", "exchange": "auto"}),
    "coded exchange": settings(
        "gpt2", WIDE, batch=2, processes=2, plan={"exchange": {"error_feedback": {"two_shot": "int8"}}}
    ),
}


def main() -> None:
    read = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    read.add_argument("--only", default="", help="names of rows, separated by commas")
    asked = read.parse_args()
    names = [name for name in CASES if not asked.only or name.split(" ")[0].strip(",") in asked.only.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        rows = [row(name, Path(folder) / name.split(" ")[0].strip(",")) for name in names]
        refused = too_large(Path(folder) / "too large")
    errors = [abs(one["error"]) for one in rows]
    result = {
        "rows": rows,
        "median_error": round(median(errors), 3),
        "largest_error": round(max(errors), 3),
        "too_large": refused,
    }
    publish("fit", result)


def row(name: str, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    (folder / "run.yaml").write_text(json.dumps(CASES[name]))
    began_s = time.monotonic()
    memory = command(folder, "--dry-run")["memory"]
    dry_s = time.monotonic() - began_s
    run = folder / command(folder)["directory"]
    lines = [json.loads(line) for line in (run / "records.jsonl").read_text().splitlines()]
    taken = max(line["peak_bytes"] for line in lines if line["kind"] == "step")
    told = memory["peak_bytes"][0]
    found = {
        "setting": name,
        "told_mb": round(told / 1e6),
        "taken_mb": round(taken / 1e6),
        "error": round(told / taken - 1, 3),
        "fits": memory["fits"],
        "dry_run_s": round(dry_s, 1),
        "by_category": next(iter(memory["by_rank"].values())),
    }
    print(json.dumps(found), file=sys.stderr, flush=True)
    return found


def too_large(folder: Path) -> dict[str, Any]:
    """What is said of a run that no machine of this size holds: 16384 sequences in one micro-batch."""
    folder.mkdir()
    asked = settings("gpt2", GPT2, batch=16384, train={"accumulate": 1})
    (folder / "run.yaml").write_text(json.dumps(asked))
    memory = command(folder, "--dry-run")["memory"]
    return {"fits": memory["fits"], "verdict": memory["verdict"]}


def command(folder: Path, *options: str) -> dict[str, Any]:
    argv = [sys.executable, "-m", "gossamer", "train", "run.yaml", *options, "--json"]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
