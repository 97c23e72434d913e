"""Train the same runs with two commits and compare them bit for bit: proof that a refactoring changes no number.

    python benchmarks/golden.py [--before COMMIT] [--after COMMIT] [--runs a,b] [--timeout 120] [--json]

Adds a git worktree for each commit (--after . uses this working tree with its uncommitted changes) and trains every
run of golden/runs.py with the source of each. Both commits train at the same time, one thread per process. Compared:

metrics  of every step: loss, gradient norm, learning rate, labels, tokens, samples; evaluations, sampled text, the
         result of the gradient proof, the ranks that verification named
bytes    payload of every step by link, as rank 0 metered it, and of all ranks as the plan forecasts it; the sum of all
         steps where messages overlap several steps (delayed fragments, co2, second moments)
tensors  sha256 of every tensor of every checkpoint, by canonical name: parameters, buffers, optimizer slots, states of
         the exchange and of the outer loop
plan     plan.yaml without its reasons and without forecast times; the second plan may have more keys

A loop under `gossamer.wrap` has no run directory. Each of its ranks reports losses, gradient norms, the bytes that
gloo was given, and the sha256 of model and optimizer tensors.

In a run NAME_of_before both commits resume what the first commit trained: the second must read old run directories.

The runs use the keys of the first commit. golden/renames.py lists what later commits renamed, and the benchmark
translates configurations and plans. Runs that choose by measurement (`sync: auto`, `adapt`, `exchange: auto` on several
hosts) are absent: their choice follows the clock. Choices that follow sizes alone (cuts, schedule, micro-batches,
`exchange: auto` on one host) are compared.

Exit status 1: some item differs, or a run failed. --runs writes no record.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from golden.artifacts import Artifacts
from golden.checkout import BEFORE, Checkout, TrainingFailed, open_checkouts
from golden.compare import PARTS, compare
from golden.runs import RUNS, Run
from result import publish


def main() -> None:
    asked = parse_arguments()
    names = asked.runs.split(",") if asked.runs else list(RUNS)
    if unknown := [name for name in names if name not in RUNS]:
        sys.exit(f"unknown runs: {', '.join(unknown)}. Choose from {', '.join(RUNS)}.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # unwinds, so that worktrees are removed
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        with open_checkouts(asked.before, asked.after, Path(folder), asked.timeout) as checkouts:
            for checkout in checkouts:
                checkout.check_import()
            rows = [compare_run(RUNS[name], Path(folder), checkouts, asked.json) for name in names]
    figures = {
        **{checkout.role: checkout.commit for checkout in checkouts},
        "equal": f"{sum(row['equal'] for row in rows)} of {len(rows)}",
        "items": {part: sum(row["items"][part] for row in rows) for part in PARTS},
        "rows": rows,
        "seconds": round(time.monotonic() - began),
    }
    if asked.runs:
        print(json.dumps(figures))
    else:
        publish("golden", figures)
    sys.exit(0 if all(row["equal"] for row in rows) else 1)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", default=BEFORE, help="first commit")
    parser.add_argument("--after", default="HEAD", help="second commit; . is this working tree")
    parser.add_argument("--runs", default="", help="names of runs, separated by commas; default: all")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one command")
    parser.add_argument("--json", action="store_true", help="print the last line only")
    return parser.parse_args()


def compare_run(run: Run, folder: Path, checkouts: Sequence[Checkout], is_quiet: bool) -> dict[str, Any]:
    """Train a run with both commits at the same time, compare the artifacts, and print one line."""
    began = time.monotonic()
    with ThreadPoolExecutor(len(checkouts)) as threads:
        try:
            before, after = threads.map(partial(train, run, folder, checkouts[0]), checkouts)
        except BaseException:  # an interrupt reaches this thread alone: end what the others wait for
            for checkout in checkouts:
                checkout.stop()
            raise
    row = {"name": run.name, **compare(before, after), "seconds": round(time.monotonic() - began, 1)}
    if not is_quiet:
        items = ", ".join(f"{count} {part}" for part, count in row["items"].items())
        result = f"equal ({items})" if row["equal"] else f"DIFFERS: {'; '.join(row['differences'])}"
        print(f"{run.name}: {result}, {row['seconds']} s", file=sys.stderr, flush=True)
    return row


def train(run: Run, folder: Path, before: Checkout, checkout: Checkout) -> Artifacts | str:
    """Train a run with one commit; return its artifacts, or why it failed."""
    try:
        return checkout.train(run, folder / checkout.role / run.name, before)
    except TrainingFailed as error:
        return str(error)
    except (OSError, LookupError, TypeError, ValueError) as error:
        return f"its files cannot be read: {error!r}"


if __name__ == "__main__":
    main()
