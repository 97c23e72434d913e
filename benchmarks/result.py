"""What every benchmark ends with: docs/results/<name>.json for the record, and one JSON line at last."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    import torch

    model = next((x.split(":")[1].strip() for x in _lines("/proc/cpuinfo") if x.startswith("model name")), "unknown")
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    memory = next((x.split()[1] for x in _lines("/proc/meminfo") if x.startswith("MemTotal")), "0")
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(memory) / 2**20, 1),
        "gpus": gpus,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def commit() -> str:
    """The commit of the measured code; "+" when the tree had changes."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    dirty = git("status", "--porcelain", "--", "src", "benchmarks")
    return git("rev-parse", "--short", "HEAD") + ("+" if dirty else "")


def publish(name: str, figures: dict[str, Any], *, script: str = "") -> None:
    """Write docs/results/<name>.json and print the figures as the last line. `script`: its name, where the record has
    another."""
    _write(name, _signed(figures, script or name))
    print(json.dumps(figures))


def publish_part(name: str, key: str, figures: dict[str, Any]) -> None:
    """Write the figures to docs/results/<name>.json under `key`, with a commit, date and machine of their own.

    The rest of the record stays. Prints the figures as the last line.
    """
    _write(name, {**recorded(name), key: _signed(figures, name)})
    print(json.dumps(figures))


def recorded(name: str) -> dict[str, Any]:
    """Return what docs/results/<name>.json holds, nothing where there is none."""
    file = RESULTS / f"{name}.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return found


def ratio(ours: list[float], theirs: list[float]) -> dict[str, Any]:
    """Median of the ratios of interleaved pairs, with the pairs' spread."""
    pairs = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    return {"median": round(median(pairs), 4), "pairs": [round(p, 4) for p in pairs]}


def _signed(figures: dict[str, Any], script: str) -> dict[str, Any]:
    return {
        **figures,
        "command": " ".join(["python", f"benchmarks/{script}.py", *_told(sys.argv[1:])]),
        "date": date.today().isoformat(),
        "commit": commit(),
        "machine": machine(),
    }


def _told(arguments: list[str]) -> list[str]:
    """Return the arguments without `--cache PATH`, as where trials are kept changes no figure."""
    at = arguments.index("--cache") if "--cache" in arguments else len(arguments)
    return [one for one in arguments[:at] + arguments[at + 2 :] if not one.startswith("--cache=")]


def _write(name: str, record: dict[str, Any]) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    beside = RESULTS / f".{name}.json"
    beside.write_text(json.dumps(record, indent=1) + "\n")
    beside.replace(RESULTS / f"{name}.json")


def _lines(file: str) -> list[str]:
    try:
        return Path(file).read_text().splitlines()
    except OSError:
        return []
