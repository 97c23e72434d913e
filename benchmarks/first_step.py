"""How long a newcomer waits: from the command to the first loss, and to the end of `gossamer demo`.

    python benchmarks/first_step.py

Runs `gossamer demo --json` as a user would, in an empty folder, and watches the run's records. The tokenized corpus
is made anew (an empty cache), as on a machine that has never run it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from result import publish

TARGETS = {"first_step_s": 20.0, "demo_s": 180.0, "validation_bits_per_byte": 2.5}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "XDG_CACHE_HOME": f"{folder}/cache"}
        began = time.monotonic()
        argv = [sys.executable, "-m", "gossamer", "demo", "--json"]
        demo = subprocess.Popen(argv, cwd=folder, env=env, stdout=subprocess.PIPE, text=True)
        first = wait_for_step(Path(folder), demo, began)
        said, _ = demo.communicate(timeout=900)
        took = time.monotonic() - began
    assert demo.returncode == 0, said[-4000:]
    told = json.loads(said.splitlines()[-1])
    publish(
        "first_step",
        {
            "first_step_s": round(first, 2),
            "demo_s": round(took, 1),
            "validation_bits_per_byte": round(told["validation_bits_per_byte"], 4),
            "targets": TARGETS,
        },
    )


def wait_for_step(folder: Path, demo: subprocess.Popen[str], began: float) -> float:
    """Seconds until the first step stands in the records."""
    while demo.poll() is None:
        for file in folder.glob("runs/*/records.jsonl"):
            if '"kind":"step"' in file.read_text():
                return time.monotonic() - began
        time.sleep(0.05)
    raise AssertionError("the demo ended before its first step")


if __name__ == "__main__":
    main()
