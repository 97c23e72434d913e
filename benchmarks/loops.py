"""Habits of training loops under `gossamer.wrap`: is what comes out equal to one process of plain torch, or refused?

    python benchmarks/loops.py [--habits a,b] [--pages batches,losses] [--ranks 1,2,3] [--no-fp32]
                              [--jobs 2] [--limit 60] [--json]

Each habit of benchmarks/habits is one loop, run with wrap as the identity in one process, then with gossamer.wrap on
1, 2 and 3 ranks, which are started as torchrun starts them, with the same batches. float64, no dropout, 10 optimizer
steps or more; then fp32, 3 steps, on 2 ranks. `result`:

equal    every parameter and buffer within 1e-9 (fp32: 1e-5) of its largest entry, and the same bits on all ranks
alike    a lossy exchange, 16 bits, or noise of each rank's own: the same bits on all ranks, near those of one process
refused  an error of ours, with no step taken that one process does not take
wrong    anything else that ended, a refusal that does not name what it should among it
crash    an error that is not ours
hang     no end within --limit seconds

`wanted` says what must be; `good` whether it is: a refusal of what must be equal is not good.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

import habits
from loops.crew import as_launched
from loops.habit import HABITS, Habit
from loops.judge import ORDER, judge
from pool import judged
from result import publish


def main() -> None:
    read = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    read.add_argument("--habits", default="", help="these alone")
    read.add_argument("--pages", default="", help=f"those of these pages alone, of {', '.join(habits.PAGES)}")
    read.add_argument("--ranks", default="1,2,3")
    read.add_argument("--jobs", type=int, default=2)
    read.add_argument("--limit", type=float, default=60.0, help="seconds for one trial")
    read.add_argument("--no-fp32", action="store_true", help="float64 alone")
    read.add_argument("--json", action="store_true", help="nothing but the last line")
    asked = read.parse_args()
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # and with it all that was started
    names = [name for name in asked.habits.split(",") if name]
    pages = [page for page in asked.pages.split(",") if page]
    if unknown := [n for n in names if n not in HABITS] + [p for p in pages if p not in habits.PAGES]:
        sys.exit(f"there is no {', no '.join(unknown)}")
    types = (torch.float64,) if asked.no_fp32 else (torch.float64, torch.float32)
    chosen = [h for h in HABITS.values() if (not names or h.name in names) and (not pages or h.page in pages)]
    ranks = [int(count) for count in asked.ranks.split(",")]
    began, rows = time.monotonic(), []
    for row in all_judged(chosen, partial(judge, ranks=ranks, types=types, limit_s=asked.limit), asked.jobs):
        rows.append(row)
        if not asked.json:
            mark = "    " if row["good"] else "BAD "
            print(f"{len(rows)}/{len(chosen)} {mark}{row['habit']}: {row['detail']}", file=sys.stderr, flush=True)
    rows.sort(key=lambda row: list(HABITS).index(row["habit"]))
    results = Counter(row["result"] for row in rows)
    figures = {
        "rows": rows,
        "results": {result: results[result] for result in ORDER if results[result]},
        "good": f"{sum(row['good'] for row in rows)} of {len(rows)}",
        "ranks": ranks,
        "seconds": round(time.monotonic() - began),
    }
    if names or pages or asked.no_fp32 or asked.ranks != "1,2,3":
        print(json.dumps(figures))
    else:
        publish("loops", figures)


Judge = Callable[[Habit], dict[str, Any]]


def all_judged(chosen: Sequence[Habit], by: Judge, jobs: int) -> Iterator[dict[str, Any]]:
    """Rows as they come. Those of torchrun last: what all of them import is imported once, under its variables."""
    yield from judged([h for h in chosen if h.launcher != "torchrun"], by, otherwise=row_of, jobs=jobs)
    as_launched("torchrun")
    import gossamer

    assert gossamer.wrap
    yield from judged([h for h in chosen if h.launcher == "torchrun"], by, otherwise=row_of, jobs=jobs)


def row_of(habit: Habit, said: str) -> dict[str, Any]:
    """Of a habit that could not be judged."""
    return {
        "habit": habit.name,
        "page": habit.page,
        "wanted": habit.wanted,
        "result": "crash",
        "good": False,
        "detail": said.strip().splitlines()[-1][:500],
        "seconds": 0.0,
    }


if __name__ == "__main__":
    main()
