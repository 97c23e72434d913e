"""The commands that read run directories: `gossamer runs`, `compare` and `report`. They change no run."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

from gossamer.cli.output import CommandResult, Json
from gossamer.spec.errors import bad_input
from gossamer.spec.units import show_bytes
from gossamer.view.run_directory import RUNS, open_run
from gossamer.view.run_glance import glances
from gossamer.view.run_list import Wanted, list_text
from gossamer.view.screen import Screen


def runs(
    *words: str,
    outcome: str = "",
    model: str = "",
    since: str = "",
    json: Json = False,
) -> CommandResult:
    """List the runs of a folder, the one written to last first, e.g. `gossamer runs --outcome failed --since 7d`.

    Parameters
    ----------
    words
        Words that the name, model or data of a run must have. A first one that is a folder is the folder to list; the
        folder is else "runs".
    outcome
        Only runs of this outcome: done, failed, interrupted, running, unfinished (no end, and nobody trains) or empty.
    model
        Only runs whose model has this in its name.
    since
        Only runs begun since then: 90m, 12h, 7d ago, or a date such as 2026-11-01.
    """
    folder, rest = (Path(words[0]), words[1:]) if words and Path(words[0]).is_dir() else (RUNS, words)
    if not folder.is_dir():
        raise bad_input(
            wanted=f"a folder of runs at {folder.absolute()}",
            got="no such folder",
            do="start a run with `gossamer train`, or name the folder: gossamer runs FOLDER",
        )
    wanted = Wanted.of(outcome=outcome, model=model, since=since, words=rest)
    found = glances(folder)
    chosen = [run for run in found if wanted.fits(run)]
    text = list_text(chosen, Screen.of(), now_s=time.time())
    if not chosen:
        text = f"no run of the {len(found)} in {folder} is asked for" if found else f"no runs in {folder}"
    data = {"directory": str(folder), "of": len(found), "runs": [asdict(run) for run in chosen]}
    return CommandResult(data, text)


def compare(*run: Path, json: Json = False) -> CommandResult:
    """Compare runs: what differs in settings, figures at the last common step, and the loss curves on one axis.

    Parameters
    ----------
    run
        Two or more runs: folders, unique parts of names in runs/, or "latest".
    """
    from gossamer.view.comparison import Comparison
    from gossamer.view.comparison_text import comparison_text
    from gossamer.view.run_history import RunHistory

    found = Comparison.of([RunHistory.read(open_run(one)) for one in run])
    return CommandResult(found.data(), comparison_text(found, Screen.of()))


def report(run: Path, /, *, out: Path | None = None, json: Json = False) -> CommandResult:
    """Write the report of a run: one HTML file that needs no network, and the same as Markdown beside it.

    Parameters
    ----------
    run
        The run: its folder, a unique part of its name in runs/, or "latest".
    out
        The HTML file to write; default: report.html in the run's folder. The Markdown has its name with .md.
    """
    from gossamer.view.report import write_report
    from gossamer.view.run_history import RunHistory

    directory = open_run(run)
    made = write_report(RunHistory.read(directory), out if out is not None else directory.path / "report.html")
    text = f"{made.html} ({show_bytes(made.html_bytes)}): open it in a browser\n{made.markdown}: the same as Markdown"
    data = {
        "directory": str(directory.path),
        "html": str(made.html),
        "markdown": str(made.markdown),
        "html_bytes": made.html_bytes,
        "markdown_bytes": made.markdown_bytes,
    }
    return CommandResult(data, text, is_report=True)
