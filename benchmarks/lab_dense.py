"""Four hosts on 100 Mbit/s links train what one process trains; bytes as forecast, and as the interfaces count them.

    python benchmarks/lab_dense.py [--hosts 4] [--rate 100mbit] [--steps 50]

Needs root and iproute2 (see `gossamer doctor`). The same run.yaml runs once alone and once on every host of a
laboratory. Compared: the loss of every step (fp32), the metered payload bytes with the plan's forecast (exactly),
and the interfaces' own counters with what the header model makes of the payload.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from result import publish

CONFIG = {
    "model": {
        "hf": "llama",
        "config": {
            "vocab_size": 257,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
        },
    },
    "data": {"source": "stdlib", "tokenizer": "byte", "sequence": 64},
    "train": {"batch": 16, "optimizer": {"adamw": {"lr": 1e-3}}, "evaluate_every": 0, "checkpoint_every": 0},
    "plan": {"exchange": "dense"},  # nothing is measured first, so the interfaces count the steps alone
    "run": {"display": "plain"},
}


def main() -> None:
    read = argparse.ArgumentParser()
    read.add_argument("--hosts", type=int, default=4)
    read.add_argument("--rate", default="100mbit")
    read.add_argument("--steps", type=int, default=50)
    asked = read.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = {**CONFIG, "train": {**CONFIG["train"], "steps": asked.steps}}
        config["run"] = {**CONFIG["run"], "directory": folder}
        alone = run_one(Path(folder), {**config, "run": {**config["run"], "name": "alone"}}, [])
        lab = ["lab", "run", "--hosts", str(asked.hosts), "--rate", asked.rate, "--json", "--"]
        together = run_one(Path(folder), {**config, "run": {**config["run"], "name": "together"}}, lab)
    publish("lab_dense", {"hosts": asked.hosts, "rate": asked.rate, **compare(alone, together, asked.hosts)})


def run_one(folder: Path, config: dict, prefix: list[str]) -> dict:
    """Records, plan and what was printed of one run."""
    file = folder / f"{config['run']['name']}.yaml"
    file.write_text(json.dumps(config))
    gossamer = [sys.executable, "-m", "gossamer"]
    argv = [*gossamer, *prefix, *([*gossamer] if prefix else []), "train", str(file)]
    done = subprocess.run(argv, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (directory,) = folder.glob(f"*{config['run']['name']}/")
    import yaml

    return {
        "records": [json.loads(x) for x in (directory / "records.jsonl").read_text().splitlines()],
        "plan": yaml.safe_load((directory / "plan.yaml").read_text()),
        "said": json.loads(done.stdout.splitlines()[-1]) if prefix else {},
    }


def compare(alone: dict, together: dict, hosts: int) -> dict:
    losses = [[r["loss"] for r in run["records"] if r["kind"] == "step"] for run in (alone, together)]
    worst = max(abs(a - b) / abs(a) for a, b in zip(*losses, strict=True))
    steps = [r for r in together["records"] if r["kind"] == "step"]
    forecast = together["plan"]["forecast"]["wire_bytes"]
    mine = {link: n for link, n in forecast.items() if link.startswith("0>")}
    exact = all(step["wire_bytes"] == mine for step in steps)
    payload = sum(forecast.values()) * len(steps)
    counted = sum(link["tx"] for link in together["said"]["bytes_per_link"].values())
    return {
        "steps": len(steps),
        "worst_relative_loss_difference": worst,
        "losses_equal_1e-5": worst <= 1e-5,
        "metered_equals_forecast": exact,
        "forecast_bytes_per_step": sum(forecast.values()),
        "payload_bytes": payload,
        "interface_bytes": counted,
        "ratio_interface": round(counted / payload, 4),
        "step_s": sorted(s["step_s"] for s in steps)[len(steps) // 2],
        "exposed_s": sorted(s["exposed_s"] for s in steps)[len(steps) // 2],
        "tokens_per_s": round(steps[0]["tokens"] / sorted(s["step_s"] for s in steps)[len(steps) // 2], 1),
        "hosts_counted": hosts,
    }


if __name__ == "__main__":
    main()
