"""The commands that read run directories: `gossamer runs`, `compare` and `report`. They write to no run."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

from gossamer.cli.output import CommandResult, Json
from gossamer.spec.errors import bad_input
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
