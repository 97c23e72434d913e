"""Modules as people write them, trained in stages: is what comes out equal to a loop of plain torch, or refused?

    python benchmarks/proof.py [--habits a,b] [--pages values,edges] [--jobs 2] [--limit 60] [--again] [--json]

Each habit of benchmarks/proof/pages is a factory of a module that nobody adapted. It is trained for 4 steps of 4
micro-batches with gossamer.train on 1 rank, and in stages on 3 (or as the habit says), in real processes, fp32; the
losses of all steps, and all parameters and buffers at the end, are compared with a loop of plain torch in one process.
`result`, the worse of the two:

equal    every tensor within 2e-5 of its largest entry (lossy crossings: as the habit says)
refused  refused input that names what it is about, and no step before it differs from the plain loop's
wrong    anything else that ended, steps that were all rejected among it
crash    any other error
hang     no end within --limit seconds

`without_proof` is the same with train.prove: never; `where` says what differs, or the message; `wanted` what must be.
`hard`: of a kind that was once wrong, lost to nan or crashed. `late`: shows after the first step alone.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections import Counter
from functools import partial
from typing import Any

import torch

from loops.crew import as_launched
from pool import judged
from proof import pages
from proof.habit import HABITS, Habit
from proof.judge import ORDER, judge
from result import RESULTS, publish


def main() -> None:
    read = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    read.add_argument("--habits", default="", help="these alone")
    read.add_argument("--pages", default="", help=f"those of these pages alone, of {', '.join(pages.PAGES)}")
    read.add_argument("--jobs", type=int, default=2)
    read.add_argument("--limit", type=float, default=60.0, help="seconds for one trial")
    read.add_argument("--again", action="store_true", help="those of the record that were not as wanted, and new ones")
    read.add_argument("--json", action="store_true", help="nothing but the last line")
    asked = read.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # and with it all that was started
    names = [name for name in asked.habits.split(",") if name]
    some = [page for page in asked.pages.split(",") if page]
    if unknown := [n for n in names if n not in HABITS] + [p for p in some if p not in pages.PAGES]:
        sys.exit(f"there is no {', no '.join(unknown)}")
    chosen = [h for h in HABITS.values() if (not names or h.name in names) and (not some or h.page in some)]
    kept = record() if asked.again else {"rows": []}
    rows = [row for row in kept["rows"] if row["good"]]
    chosen = [h for h in chosen if h.name not in {row["habit"] for row in rows}]
    before, began = len(rows), time.monotonic()
    warm()
    for row in judged(chosen, partial(judge, limit_s=asked.limit), otherwise=row_of, jobs=asked.jobs):
        rows.append(row)
        if not asked.json:
            mark = "    " if row["good"] else "BAD "
            told = f"{row['result']}, not proved {row['without_proof']}: {row['where']}"
            print(f"{len(rows) - before}/{len(chosen)} {mark}{row['habit']}: {told}", file=sys.stderr, flush=True)
    rows.sort(key=lambda row: list(HABITS).index(row["habit"]))
    figures = summed(rows) | {"rows": rows, "seconds": round(time.monotonic() - began)}
    if before:
        figures |= {"rows_of": {"earlier": before, "commit": kept["commit"], "seconds": kept["seconds"]}}
    if names or some:
        print(json.dumps(figures))
    else:
        publish("proof", figures)


def record() -> dict[str, Any]:
    """docs/results/proof.json, without rows of habits that are no more."""
    found = json.loads((RESULTS / "proof.json").read_text())
    return {**found, "rows": [row for row in found["rows"] if row["habit"] in HABITS]}


def warm() -> None:
    """What every process of a trial imports is imported once, before any is forked."""
    torch.set_num_threads(1)
    as_launched("by_hand")
    import transformers

    import gossamer.job.in_process

    assert gossamer.job.in_process and transformers


def summed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    def counted(key: str, some: list[dict[str, Any]]) -> dict[str, int]:
        found = Counter(row[key] for row in some)
        return {result: found[result] for result in ORDER if found[result]}

    hard, late = [row for row in rows if row["hard"]], [row for row in rows if row["late"]]
    return {
        "results": counted("result", rows),
        "without_proof": counted("without_proof", rows),
        "hard": counted("result", hard),
        "late": counted("result", late),
        "good": f"{sum(row['good'] for row in rows)} of {len(rows)}",
    }


def row_of(habit: Habit, said: str) -> dict[str, Any]:
    """Of a habit that could not be judged."""
    return {
        "habit": habit.name,
        "page": habit.page,
        "wanted": habit.wanted,
        "hard": habit.hard,
        "late": habit.late,
        "result": "crash",
        "without_proof": "crash",
        "good": False,
        "where": said.strip().splitlines()[-1][:500],
        "seconds": 0.0,
    }


if __name__ == "__main__":
    main()
