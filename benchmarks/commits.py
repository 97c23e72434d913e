"""What a refactoring costs: the speed, peak memory and first step of two commits, in interleaved rounds of one run.

    python benchmarks/commits.py [--before COMMIT] [--after COMMIT] [--pairs 7] [--steps 12]

Adds a git worktree for each commit (--after . uses this working tree). A round is fresh processes with the source of
one commit: our side of its own overhead.py with one and with two ranks, and `gossamer demo` with an empty cache until
its first step stands in the records. The commits take turns; every figure is a median of ratios of pairs, after to
before: below 1 the second commit is faster, or needs less.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import rounds
from first_step import wait_for_step
from golden.checkout import BEFORE, Checkout, open_checkouts
from overhead import environment
from result import publish, ratio

RANKS = {"single": 1, "ddp": 2}
Figures = Mapping[str, float]


def main() -> None:
    read = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    read.add_argument("--before", default=BEFORE, help="first commit")
    read.add_argument("--after", default="HEAD", help="second commit; . is this working tree")
    read.add_argument("--pairs", type=int, default=7)
    read.add_argument("--steps", type=int, default=12)
    asked = read.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # unwinds, so that worktrees are removed
    with tempfile.TemporaryDirectory(prefix="commits-") as folder:
        with open_checkouts(asked.before, asked.after, Path(folder), 600.0) as checkouts:
            for checkout in checkouts:
                checkout.check_import()
            found = [_pair(checkouts, pair, asked.steps) for pair in range(asked.pairs)]
    publish("commits", {**{one.role: one.commit for one in checkouts}, **_figures(found)})


def _pair(checkouts: tuple[Checkout, Checkout], pair: int, steps: int) -> dict[str, Figures]:
    """One round of each commit, of each kind; who goes first alternates."""
    found: dict[str, Figures] = {}
    order = checkouts if pair % 2 == 0 else checkouts[::-1]
    for kind in (*RANKS, "first_step"):
        for checkout in order:
            figures = _first_step(checkout) if kind == "first_step" else _steps(checkout, RANKS[kind], steps)
            found[f"{kind} {checkout.role}"] = figures
            print(f"{pair} {kind:10s} {checkout.role:6s} {figures}", file=sys.stderr, flush=True)
    return found


def _steps(checkout: Checkout, ranks: int, steps: int) -> Figures:
    """Steps of our side of the commit's own overhead.py: tokens/s and peak bytes of rank 0."""
    script = checkout.tree / "benchmarks" / "overhead.py"
    env = {"PYTHONPATH": str(checkout.tree / "src"), **environment(ranks)}
    return rounds.one_round(str(script), "ours", ranks=ranks, steps=steps, env=env)


def _first_step(checkout: Checkout) -> Figures:
    """Seconds from `gossamer demo` to the first step in the records, with an empty cache; then the demo is stopped."""
    with tempfile.TemporaryDirectory() as folder:
        own = {"PYTHONPATH": str(checkout.tree / "src"), "XDG_CACHE_HOME": f"{folder}/cache"}
        began = time.monotonic()
        demo = subprocess.Popen(
            [sys.executable, "-m", "gossamer", "demo", "--json"],
            cwd=folder,
            env={**os.environ, **own},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            return {"first_step_s": wait_for_step(Path(folder), demo, began)}
        finally:
            demo.send_signal(signal.SIGTERM)  # saves and stops
            demo.wait(timeout=120)


def _figures(found: list[dict[str, Figures]]) -> dict[str, Any]:
    def of(kind: str, role: str, figure: str) -> list[float]:
        return [pair[f"{kind} {role}"][figure] for pair in found]

    told: dict[str, Any] = {}
    for kind in RANKS:
        before, after = (of(kind, role, "tokens_per_s") for role in ("before", "after"))
        seconds = ratio(before, after)  # tokens/s the other way round: seconds of a step
        told[f"step_time_{kind}"] = seconds["median"]
        told[f"step_time_{kind}_pairs"] = seconds["pairs"]
        peaks = [median(of(kind, role, "peak_bytes")) for role in ("after", "before")]
        told[f"peak_memory_{kind}"] = round(peaks[0] / peaks[1], 4)
    first = ratio(of("first_step", "after", "first_step_s"), of("first_step", "before", "first_step_s"))
    seconds_s = {role: round(median(of("first_step", role, "first_step_s")), 2) for role in ("before", "after")}
    return {**told, "first_step": first["median"], "first_step_pairs": first["pairs"], "first_step_s": seconds_s}


if __name__ == "__main__":
    main()
