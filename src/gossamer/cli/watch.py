"""The command `gossamer watch`: look at a run while it goes on, or after its end."""

from __future__ import annotations

import io
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from gossamer.cli.output import CommandResult, Json
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput
from gossamer.spec.extras import install
from gossamer.view.summary import summarize
from gossamer.view.watch.canvas import ASCII, UNICODE, Canvas
from gossamer.view.watch.overview_pane import overview
from gossamer.view.watch.panes import head
from gossamer.view.watch.run_choice import choose_run
from gossamer.view.watch.watched_run import WatchedRun


def watch(run: str = "", /, *, json: Json = False) -> CommandResult:
    """Watch a run, e.g. `gossamer watch` or `gossamer watch runs/NAME`: curve, ranks, links, forecast, events, logs.

    It reads the run's folder alone, and can be closed at any time: the run does not notice. Where the output is no
    terminal, and with --json, it says once how the run stands.

    Parameters
    ----------
    run
        A run's folder or name, or a part of its name; without one the newest run under runs/ that is under way, or the
        newest.
    """
    found = WatchedRun(choose_run(run, Path(RunConfig().run.directory)))
    if json or not _is_terminal():
        return _once(found)
    try:
        from gossamer.view.watch.app import WatchApp
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "textual":
            raise
        raise BadInput(f"watch needs the package textual: {install('tui')}") from None
    glyphs = UNICODE if _is_utf8() else ASCII
    WatchApp(found, glyphs=glyphs, has_color=not os.environ.get("NO_COLOR")).run(mouse=False)
    return CommandResult({})


def _once(found: WatchedRun) -> CommandResult:
    now_s = time.time()
    while found.is_behind:
        found.read(now_s)
    state = found.state
    data: dict[str, Any] = {"state": state.word, "why": state.why, "remaining_s": found.progress.remaining_s}
    canvas = Canvas(shutil.get_terminal_size().columns, UNICODE if _is_utf8() else ASCII, has_color=False)
    lines = [*head(found, canvas, now_s=now_s), *overview(found, canvas)]
    text = "\n".join(line.plain.rstrip() for line in lines)
    return CommandResult({**data, **summarize(found.directory)}, text)


def _is_terminal() -> bool:
    try:
        return sys.stdout.isatty() and sys.stdin.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb")
    except (ValueError, OSError, AttributeError, io.UnsupportedOperation):  # closed
        return False


def _is_utf8() -> bool:
    return (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
