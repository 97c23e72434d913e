"""What each way of saving memory takes and saves: one file per method in benchmarks/savers, found by its name.

    python benchmarks/savers.py [METHOD ...] [--quick] [--json]

Without names, all of them; rows of methods that are not asked for stay as they were, with the commit that they were
measured at. --quick takes under 10 minutes, and `left_out` says what it did not run.
"""

from __future__ import annotations

import argparse
import pkgutil
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from result import commit, publish, recorded

FILES = [m.name for m in pkgutil.iter_modules([str(Path(__file__).parent / "savers")]) if not m.name.startswith("_")]


def main() -> None:
    read = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    read.add_argument("methods", nargs="*", metavar="METHOD", help=f"of {', '.join(FILES)}")
    read.add_argument("--quick", action="store_true", help="under 10 minutes in all; kept in a record of its own")
    read.add_argument("--json", action="store_true", help="no table; the last line is always JSON")
    asked = read.parse_args()
    chosen = asked.methods or FILES
    if unknown := set(chosen) - set(FILES):
        read.error(f"no method is called {', '.join(sorted(unknown))}: there are {', '.join(FILES)}")
    record = "savers_quick" if asked.quick else "savers"
    before = recorded(record)
    rows = [row for row in before.get("rows", []) if row["file"] not in chosen and row["file"] in FILES]
    left_out = {name: why for name, why in before.get("left_out", {}).items() if name not in chosen and name in FILES}
    for name in chosen:
        module = import_module(f"savers.{name}")
        rows += [{"file": name, "commit": commit(), **asdict(row)} for row in module.rows(quick=asked.quick)]
        if asked.quick and (why := getattr(module, "NOT_QUICK", "")):
            left_out[name] = why
    rows.sort(key=lambda row: FILES.index(row["file"]))
    if not asked.json:
        _table(rows)
    publish(record, {"quick": asked.quick, "rows": rows, "left_out": left_out}, script="savers")


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
