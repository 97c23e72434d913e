"""What papers claim about time, measured here: one file per paper in benchmarks/claims, found by its name.

    python benchmarks/claims.py [PAPER ...] [--quick]

Needs root and iproute2 (see `gossamer doctor`). Without names, all of them; rows of papers that are not asked for stay
as they were, with the commit that they were measured at. A claim that does not hold here is a row like any other.
"""

from __future__ import annotations

import argparse
import json
import pkgutil
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

from result import RESULTS, commit, publish

PAPERS = [m.name for m in pkgutil.iter_modules([str(Path(__file__).parent / "claims")]) if not m.name.startswith("_")]


def main() -> None:
    read = argparse.ArgumentParser()
    read.add_argument("papers", nargs="*", metavar="PAPER", help=f"of {', '.join(PAPERS)}")
    read.add_argument("--quick", action="store_true", help="fewer repetitions")
    asked = read.parse_args()
    chosen = asked.papers or PAPERS
    if unknown := set(chosen) - set(PAPERS):
        read.error(f"no paper is called {', '.join(sorted(unknown))}: there are {', '.join(PAPERS)}")
    rows = [row for row in before() if row["paper"] not in chosen and row["paper"] in PAPERS]
    for name in chosen:
        found = import_module(f"claims.{name}").rows(quick=asked.quick)
        rows += [{"paper": name, "commit": commit(), **asdict(row)} for row in found]
    publish("claims", {"rows": sorted(rows, key=lambda row: PAPERS.index(row["paper"]))})


def before() -> list[dict]:
    """The rows of the last time."""
    file = RESULTS / "claims.json"
    return json.loads(file.read_text())["rows"] if file.exists() else []


if __name__ == "__main__":
    main()
