"""The one harness of benchmarks/claims.py and its like: find studies, run those that are asked for, keep their rows.

A folder beside this one has a module per paper or method with `studies(*, quick)`; `docs/results/FOLDER.json` is its
record, and FOLDER_quick.json that of --quick.
"""

from __future__ import annotations

import argparse
import os
import pkgutil
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from claims import Study
from claims._frozen import check_rows
from claims._record import chosen, merged, written
from claims._trials import OutOfTime, Trials
from gossamer.spec.errors import BadInput
from links.keep import Kept
from result import commit, publish, recorded

QUICK_HOURS = 0.15


def main(said: str | None, *, folder: str, unit: str, hours: float, argv: Sequence[str] | None = None) -> None:
    """Run the studies of benchmarks/`folder`. said: the help; unit: what a file there is; hours: when none is given."""
    files = [m.name for m in pkgutil.iter_modules(import_module(folder).__path__) if not m.name.startswith("_")]
    read = _reader(said, folder, unit, hours, files)
    asked = read.parse_args(argv)
    if asked.quick:
        asked.hours = min(asked.hours, QUICK_HOURS)
    if unknown := set(asked.files) - set(files):
        read.error(f"no {unit.lower()} is called {', '.join(sorted(unknown))}: there are {', '.join(files)}")
    studies = {
        f"{name}.{study.name}": study
        for name in files
        for study in import_module(f"{folder}.{name}").studies(quick=asked.quick)
    }
    names = chosen(studies, asked.files, asked.rows)
    if asked.list:
        print("\n".join(names))
        return
    if not names:
        read.error(f"no study is called so: there are {', '.join(chosen(studies, asked.files, []))}")
    rows, why, is_failed = _run(studies, sorted(names, key=lambda name: -studies[name].worth), asked)
    record = f"{folder}_quick" if asked.quick else folder
    figures = merged(recorded(record), list(studies), rows, why)
    if not asked.json:
        _table(figures, names)
    publish(record, {"quick": asked.quick, **figures}, script=folder)
    sys.exit(1 if is_failed else 0)


def _reader(said: str | None, folder: str, unit: str, hours: float, files: list[str]) -> argparse.ArgumentParser:
    read = argparse.ArgumentParser(description=said, formatter_class=argparse.RawDescriptionHelpFormatter)
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    read.add_argument("files", nargs="*", metavar=unit, help=f"of {', '.join(files)}")
    read.add_argument("--rows", nargs="*", default=[], metavar="PATTERN", help=f"of {unit}.STUDY")
    read.add_argument(
        "--hours", type=float, default=hours, metavar="H", help=f"no trial begins after so many hours ({hours:g})"
    )
    read.add_argument("--quick", action="store_true", help="under 10 minutes in all; kept in a record of its own")
    read.add_argument("--commit", default=commit(), help="go on with the trials that were kept at this commit")
    read.add_argument("--cache", default=f"{home}/gossamer-{folder}", metavar="FOLDER")
    read.add_argument("--list", action="store_true", help="name the studies and end")
    read.add_argument("--json", action="store_true", help="no table; the last line is always JSON")
    return read


def _run(
    studies: Mapping[str, Study], names: Sequence[str], asked: argparse.Namespace
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str], bool]:
    """Return the rows by study, why others have none, and whether one of these failed."""
    until = time.monotonic() + 3600 * asked.hours
    measured_at = commit()  # of the code that is loaded, whatever is edited meanwhile
    rows: dict[str, list[dict[str, Any]]] = {}
    why: dict[str, str] = {}
    is_failed = False
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
            why[name] = f"failed: {type(error).__name__}: {str(error).strip().splitlines()[-1:]}"
            is_failed = True
    return rows, why, is_failed


def _measured(
    name: str, study: Study, until: float, measured_at: str, asked: argparse.Namespace
) -> list[dict[str, Any]]:
    paper, _, short = name.partition(".")
    folder = Path(asked.cache, f"{asked.commit}{'-quick' * asked.quick}")
    tell = partial(print, file=sys.stderr, flush=True)
    trials = Trials(lambda study: Kept(folder / f"{study}.json"), name, commit=measured_at, until=until, tell=tell)
    found = [replace(row, details=dict(row.details)) for row in study.measure(trials)]
    check_rows(name, [row.details for row in found])
    commits = ", ".join(sorted(trials.commits)) or measured_at
    return [{"paper": paper, "study": short, "commit": commits, **written(asdict(row))} for row in found]


def _table(figures: dict[str, Any], names: Sequence[str]) -> None:
    def told(value: float | None) -> str:
        return "-" if value is None else f"{value:.4g}"

    print(f"{'method':22} {'ratio':>8} {'paper':>8} {'spread':>16} {'seeds':>5} {'holds':>6}  claim; of; setting")
    for row in figures["rows"]:
        if f"{row['paper']}.{row['study']}" in names:
            spread = "-" if row["spread"] is None else " .. ".join(map(told, row["spread"]))
            head = f"{row['method']:22} {told(row['ratio']):>8} {told(row['paper_ratio']):>8} {spread:>16}"
            free = row.get("ratio_without_source")
            more = "" if free is None else f" ({told(free)} without the source)"
            end = f"{row['claim']}{more}; {row['baseline']}; {row['setting']}"
            print(f"{head} {row['seeds']:5} {row['holds']!s:>6}  {end}")
    for name, reason in figures["left_out"].items():
        print(f"left out: {name}: {reason}")
