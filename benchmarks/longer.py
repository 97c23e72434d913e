"""How long the demo's model takes until it passes zlib and xz on the same text: runs of 2, 4, 8, ... times its steps.

    python benchmarks/longer.py [--hours 6]

Every run is a whole one, with a learning rate schedule of its own length, as `gossamer demo --seconds` would do it.
It ends when both marks are passed or the time is up. `reached` (steps: validation bits per byte) is what the demo's
outlook reads: copy it to LONGER in src/gossamer/api/demo.py.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

from gossamer.api.demo import CONFIG
from gossamer.data import statistics
from gossamer.job.training_data import corpus_of
from gossamer.spec.config import RunConfig
from result import publish


def main() -> None:
    read = argparse.ArgumentParser()
    read.add_argument("--hours", type=float, default=6.0, help="begin no run that would end later")
    asked = read.parse_args()
    began, marks = time.monotonic(), marks_of_the_text()
    steps, reached, seconds = 2 * CONFIG["train"]["steps"], {}, {}
    took = 0.0
    while time.monotonic() - began + 2 * took < asked.hours * 3600:
        bits, took = one_run(steps)
        reached[steps], seconds[steps] = round(bits, 4), round(took, 1)
        print(f"{steps} steps: {bits:.4f} bits/byte in {took:.0f} s, marks {marks}", file=sys.stderr, flush=True)
        if bits < min(marks.values()):
            break
        steps *= 2
    passed = {name: next((s for s, bits in reached.items() if bits < mark), None) for name, mark in marks.items()}
    publish("longer", {"reached": reached, "seconds": seconds, "marks": marks, "passed_after_steps": passed})


def marks_of_the_text() -> dict[str, float]:
    """Bits per byte of the validation text."""
    corpus = corpus_of(RunConfig.model_validate(CONFIG).data)
    found = statistics(corpus.text("train"), corpus.text("validation"))
    return {"zlib": round(found.zlib, 4), "xz": round(found.xz, 4)}


def one_run(steps: int) -> tuple[float, float]:
    """Validation bits per byte and seconds of the demo's configuration over `steps`."""
    train = {**CONFIG["train"], "steps": steps, "evaluate_every": 0, "checkpoint_every": 0}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "run.yaml").write_text(yaml.safe_dump({**CONFIG, "train": train, "run": {"display": "quiet"}}))
        argv = [sys.executable, "-m", "gossamer", "train", "run.yaml", "--json"]
        done = subprocess.run(argv, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    told = json.loads(done.stdout.splitlines()[-1])
    return told["validation_bits_per_byte"], told["seconds"]


if __name__ == "__main__":
    main()
