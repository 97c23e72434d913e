"""What papers claim, measured here: one file per paper in benchmarks/claims, found by its name.

    python benchmarks/claims.py [PAPER ...] [--rows PATTERN ...] [--hours H] [--quick] [--json]

PATTERN is of PAPER.STUDY, such as 'muon.*'; --list names them. Without names, all of them. Rows of studies that do not
run stay as they were, with the commit that they were measured at; `left_out` says which ones have none, and why.
Trials are kept in the user's cache by commit: a sweep that was ended, or whose hours were over, goes on there, and
--commit goes on with the trials of another commit, which the rows then name. Both sides of a row get the same number of
trials. A claim that does not hold here is a row like any other.

Some papers need root and iproute2 (see `gossamer doctor`). --quick takes under 10 minutes and has a record of its own.
"""

from __future__ import annotations

import argparse
import os
import pkgutil
import sys
import time
import traceback
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from claims import Study
from claims._record import chosen, merged
from claims._trials import OutOfTime, Trials
from gossamer.spec.errors import BadInput
from links.keep import Kept
from result import commit, publish, recorded

PAPERS = [m.name for m in pkgutil.iter_modules([str(Path(__file__).parent / "claims")]) if not m.name.startswith("_")]
QUICK_HOURS = 0.15


def main() -> None:
    read, asked = _arguments()
    if unknown := set(asked.papers) - set(PAPERS):
        read.error(f"no paper is called {', '.join(sorted(unknown))}: there are {', '.join(PAPERS)}")
    found = {name: import_module(f"claims.{name}").studies(quick=asked.quick) for name in PAPERS}
    studies = {f"{paper}.{study.name}": study for paper, each in found.items() for study in each}
    names = chosen(studies, asked.papers, asked.rows)
    if asked.list:
        print("\n".join(names))
        return
    if not names:
        read.error(f"no study is called so: there are {', '.join(chosen(studies, asked.papers, []))}")
    until = time.monotonic() + 3600 * asked.hours
    measured_at = commit()  # of the code that is loaded, whatever is edited meanwhile
    rows: dict[str, list[dict[str, Any]]] = {}
    why: dict[str, str] = {}
    failed: dict[str, str] = {}
    for name in names:
        if asked.quick and studies[name].not_quick:
            why[name] = studies[name].not_quick
            continue
        try:
            rows[name] = _measured(name, studies[name], until, measured_at, asked)
        except OutOfTime as reached:
            why[name] = f"the hours were over before {reached}: run it again, and it goes on there"
        except BadInput as error:
            why[name] = str(error)
        except Exception as error:  # the rows of other studies are not lost for it
            traceback.print_exc()
            why[name] = failed[name] = f"failed: {type(error).__name__}: {str(error).strip().splitlines()[-1:]}"
    record = "claims_quick" if asked.quick else "claims"
    figures = merged(recorded(record), list(studies), rows, why)
    if not asked.json:
        _table(figures, names)
    publish(record, {"quick": asked.quick, **figures}, script="claims")
    sys.exit(1 if failed else 0)


def _arguments() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    read = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    read.add_argument("papers", nargs="*", metavar="PAPER", help=f"of {', '.join(PAPERS)}")
    read.add_argument("--rows", nargs="*", default=[], metavar="PATTERN", help="of PAPER.STUDY")
    read.add_argument("--hours", type=float, default=6.0, metavar="H", help="no trial begins after so many hours (6)")
    read.add_argument("--quick", action="store_true", help="under 10 minutes in all; kept in a record of its own")
    read.add_argument("--commit", default=commit(), help="go on with the trials that were kept at this commit")
    read.add_argument("--cache", default=f"{home}/gossamer-claims", metavar="FOLDER")
    read.add_argument("--list", action="store_true", help="name the studies and end")
    read.add_argument("--json", action="store_true", help="no table; the last line is always JSON")
    asked = read.parse_args()
    if asked.quick:
        asked.hours = min(asked.hours, QUICK_HOURS)
    return read, asked


def _measured(
    name: str, study: Study, until: float, measured_at: str, asked: argparse.Namespace
) -> list[dict[str, Any]]:
    paper, _, short = name.partition(".")
    folder = Path(asked.cache, f"{asked.commit}{'-quick' * asked.quick}")
    tell = partial(print, file=sys.stderr, flush=True)
    trials = Trials(lambda study: Kept(folder / f"{study}.json"), name, commit=measured_at, until=until, tell=tell)
    found = study.measure(trials)
    commits = ", ".join(sorted(trials.commits)) or measured_at
    return [{"paper": paper, "study": short, "commit": commits, **asdict(row)} for row in found]


def _table(figures: dict[str, Any], names: list[str]) -> None:
    def told(value: float | None) -> str:
        return "-" if value is None else f"{value:.4g}"

    print(f"{'method':22} {'ratio':>8} {'paper':>8} {'spread':>16} {'seeds':>5} {'holds':>6}  claim; of; setting")
    for row in figures["rows"]:
        if f"{row['paper']}.{row['study']}" in names:
            spread = "-" if row["spread"] is None else " .. ".join(map(told, row["spread"]))
            head = f"{row['method']:22} {told(row['ratio']):>8} {told(row['paper_ratio']):>8} {spread:>16}"
            print(f"{head} {row['seeds']:5} {row['holds']!s:>6}  {row['claim']}; {row['baseline']}; {row['setting']}")
    for name, reason in figures["left_out"].items():
        print(f"left out: {name}: {reason}")


if __name__ == "__main__":
    main()
