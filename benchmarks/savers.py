"""What each way of saving memory takes and saves: one file per method in benchmarks/savers, found by its name.

    python benchmarks/savers.py [METHOD ...] [--tokens N] [--hours H] [--quick] [--json]

Without names, all of them; rows of methods that are not asked for stay as they were, with the commit that they were
measured at. --quick takes under 10 minutes, and `left_out` says what it did not run. Runs that train to a loss are kept
in the user's cache by commit: a measurement that was ended, or whose hours were over, goes on there, and --commit goes
on with those of another commit, which the rows then name.
"""

from __future__ import annotations

import argparse
import os
import pkgutil
import sys
import time
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from claims._trials import OutOfTime, Trials
from links.keep import Kept
from result import commit, publish, recorded

FILES = [m.name for m in pkgutil.iter_modules([str(Path(__file__).parent / "savers")]) if not m.name.startswith("_")]


def main() -> None:
    asked = _asked()
    chosen = asked.methods or FILES
    record = "savers_quick" if asked.quick else "savers"
    before = recorded(record)
    rows: list[dict[str, Any]] = []
    left_out = {name: why for name, why in before.get("left_out", {}).items() if name not in chosen and name in FILES}
    until = time.monotonic() + 3600 * asked.hours
    for name in chosen:
        module = import_module(f"savers.{name}")
        trials, given = _trials(asked, until), {}
        if hasattr(module, "TOKENS"):
            given = {"trials": trials, "tokens": asked.tokens or module.TOKENS}
        at = commit()  # of the code that is loaded, whatever is edited meanwhile
        try:
            found = [asdict(row) for row in module.rows(quick=asked.quick, **given)]
        except OutOfTime as reached:
            left_out[name] = (
                f"the hours were over before {reached}: run it again, and it goes on there; earlier rows stay"
            )
            continue
        rows += [{"file": name, "commit": ", ".join(sorted({*trials.commits, at})), **row} for row in found]
        if asked.quick and (why := getattr(module, "NOT_QUICK", "")):
            left_out[name] = why
    done = {row["file"] for row in rows}
    rows += [row for row in before.get("rows", []) if row["file"] not in done and row["file"] in FILES]
    rows.sort(key=lambda row: FILES.index(row["file"]))
    if not asked.json:
        _table(rows)
    publish(record, {"quick": asked.quick, "rows": rows, "left_out": left_out}, script="savers")


def _asked() -> argparse.Namespace:
    read = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    read.add_argument("methods", nargs="*", metavar="METHOD", help=f"of {', '.join(FILES)}")
    read.add_argument("--tokens", type=int, default=0, metavar="N", help="of a run to a loss (the method's own)")
    read.add_argument("--hours", type=float, default=6.0, metavar="H", help="no run begins after so many hours (6)")
    read.add_argument("--quick", action="store_true", help="under 10 minutes in all; kept in a record of its own")
    read.add_argument("--commit", default=commit(), help="go on with the runs that were kept at this commit")
    read.add_argument("--cache", default=f"{home}/gossamer-savers", metavar="FOLDER")
    read.add_argument("--json", action="store_true", help="no table; the last line is always JSON")
    asked = read.parse_args()
    if unknown := set(asked.methods) - set(FILES):
        read.error(f"no method is called {', '.join(sorted(unknown))}: there are {', '.join(FILES)}")
    if asked.tokens < 0:
        read.error(f"--tokens: wanted a number of tokens above 0, got {asked.tokens}")
    return asked


def _trials(asked: argparse.Namespace, until: float) -> Trials:
    """Return the journal of runs to a loss, which all methods share."""
    shelf = Kept(Path(asked.cache, f"{asked.commit}{'-quick' * asked.quick}", "training.json"))
    tell = partial(print, file=sys.stderr, flush=True)
    return Trials(lambda _: shelf, "savers.training", commit=commit(), until=until, tell=tell)


def _table(rows: list[dict[str, Any]]) -> None:
    def told(value: float | None, unit: float, digits: int) -> str:
        return "-" if value is None else f"{value / unit:.{digits}f}"

    head = f"{'peak MiB':>9} {'planned':>9} {'s/step':>8} {'hidden':>7} {'B/param':>8} {'loss':>8}"
    print(f"{'method':28} {'beside':20} {head}")
    for row in rows:
        memory = f"{told(row['peak_bytes'], 2**20, 1):>9} {told(row['planned_peak_bytes'], 2**20, 1):>9}"
        work = f"{told(row['step_s'], 1, 3):>8} {told(row['hidden_share'], 1, 2):>7}"
        states = f"{told(row['bytes_per_parameter'], 1, 3):>8} {told(row['loss'], 1, 4):>8}"
        print(f"{row['method']:28} {row['peer'] or 'ours':20} {memory} {work} {states}  {row['setting']}")


if __name__ == "__main__":
    main()
