"""What looking at runs costs: `gossamer runs` over 1,000 folders, `report` of 100,000 steps, `import` and `--help`.

    python benchmarks/view.py [--json] [--turns 5] [--runs 1000] [--steps 100000]

Every figure is that of a whole process, from its start to its exit; the median over the turns, and all of them.
`cpu` has the processor time beside the time that passed: where it is much less, something else ran. The run folders
are written by the benchmark (`view/made_runs.py`): records, configuration and plan, no checkpoints.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from result import ROOT, publish

TARGETS = {"runs_s": 1.0, "report_s": 5.0, "report_bytes": 3_000_000, "import_s": 0.1, "help_s": 0.3}


def main() -> None:
    read = argparse.ArgumentParser()
    read.add_argument("--json", action="store_true", help="as in the other benchmarks, the last line is always JSON")
    read.add_argument("--turns", type=int, default=5)
    read.add_argument("--runs", type=int, default=1000)
    read.add_argument("--steps", type=int, default=100_000)
    asked = read.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make(folder, runs=asked.runs, steps=asked.steps)
        programs = {
            "python_s": ["-c", "pass"],
            "import_s": ["-c", "import gossamer"],
            "help_s": ["-m", "gossamer", "--help"],
            "runs_s": ["-m", "gossamer", "runs", "many"],
            "runs_json_s": ["-m", "gossamer", "runs", "many", "--json"],
            "report_s": ["-m", "gossamer", "report", "long/a", "--out", "report.html"],
            "compare_s": ["-m", "gossamer", "compare", "long/a", "long/b"],
        }
        took: dict[str, list[float]] = {name: [] for name in programs}
        cpu: dict[str, list[float]] = {name: [] for name in programs}
        for turn in range(asked.turns):
            for name, words in programs.items():
                passed_s, worked_s = timed(words, folder)
                took[name].append(passed_s)
                cpu[name].append(worked_s)
            print(turn, {name: round(values[-1], 3) for name, values in took.items()}, file=sys.stderr, flush=True)
        files = {
            "report_bytes": "report.html",
            "report_markdown_bytes": "report.md",
            "records_bytes": "long/a/records.jsonl",
        }
        sizes = {name: (folder / file).stat().st_size for name, file in files.items()}
    spent = {name: round(median(values), 3) for name, values in took.items()}
    publish(
        "view",
        {
            "runs": asked.runs,
            "steps": asked.steps,
            **spent,
            "import_above_python_s": round(spent["import_s"] - spent["python_s"], 3),
            **sizes,
            "cpu": {name: round(median(values), 3) for name, values in cpu.items()},
            "targets": TARGETS,
            "turns": {name: [round(one, 3) for one in values] for name, values in took.items()},
        },
    )


def make(folder: Path, *, runs: int, steps: int) -> None:
    """Write the run folders."""
    from view.made_runs import make_run

    for number in range(runs):
        make_run(folder / "many" / f"20261125-{number:06d}-llama", steps=200, seed=number)
    for seed, name in enumerate("ab"):
        make_run(folder / "long" / name, steps=steps, seed=seed)


def timed(words: list[str], folder: Path) -> tuple[float, float]:
    """Return the seconds of a process of this Python that passed, and those of its processor; it must end well."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True, check=False)
    passed_s, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr[-4000:]
    if "--json" in words:
        assert len(json.loads(done.stdout)["runs"]) > 0
    return passed_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
