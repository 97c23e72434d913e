"""What `gossamer watch` shows, as lines of text: a head, the names of the panes, and the panes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from rich.text import Text

from gossamer.spec.units import show_seconds
from gossamer.view.format import ACCENT, BAD, GOOD, WARN, show_share
from gossamer.view.watch.canvas import Canvas
from gossamer.view.watch.costs_pane import forecast, links
from gossamer.view.watch.events_pane import events, logs
from gossamer.view.watch.overview_pane import overview
from gossamer.view.watch.ranks_pane import ranks
from gossamer.view.watch.watched_run import WatchedRun

COLORS = {"done": GOOD, "interrupted": WARN, "failed": BAD, "crashed": BAD, "gone": BAD, "silent": WARN}


@dataclass(frozen=True, slots=True)
class Pane:
    """A pane: its name, and its lines for a run. `is_tail`: its newest line is the last, and is what one wants."""

    name: str
    lines: Callable[[WatchedRun, Canvas], list[Text]]
    is_tail: bool = False


PANES = (
    Pane("Run", overview),
    Pane("Ranks", ranks),
    Pane("Links", links),
    Pane("Forecast", forecast),
    Pane("Events", events, is_tail=True),
    Pane("Logs", logs, is_tail=True),
)


def head(run: WatchedRun, canvas: Canvas, *, now_s: float, is_paused: bool = False) -> list[Text]:
    """Return two lines: the state and name of the run, and how far it is."""
    state = run.state
    word = "paused" if is_paused else state.word
    style = canvas.color(WARN if is_paused else COLORS.get(state.word, ACCENT))
    about = run.directory.name
    if run.last_s and state.word in ("crashed", "silent", "gone"):
        about += f", last record {show_seconds(max(1, round(now_s - run.last_s)))} ago"
    return [canvas.line((f" {word} ", f"bold reverse {style}".strip()), " ", about), _stroke(run, canvas, now_s)]


def _stroke(run: WatchedRun, canvas: Canvas, now_s: float) -> Text:
    progress, state = run.progress, run.state
    if progress.start is None:
        said = state.why if state.word not in ("starting", "running") else "processes, data, model"
        return canvas.line((said or state.word, "dim"))
    count = f"step {progress.steps_done:,} / {progress.steps:,}"
    after = f"{show_share(progress.fraction)}  {_clock(run, now_s)}"
    room = canvas.width - len(count) - len(after) - 2
    if room < 6:
        return canvas.line((count, "bold"), f"  {after}")
    done = min(room, int(room * progress.fraction))
    return canvas.line(
        (count, "bold"),
        " ",
        (canvas.glyphs.done * done, canvas.color(GOOD if progress.fraction >= 1 else ACCENT)),
        (canvas.glyphs.open * (room - done), "dim"),
        f" {after}",
    )


def _clock(run: WatchedRun, now_s: float) -> str:
    progress, start = run.progress, run.progress.start
    assert start is not None
    if progress.end is not None:
        return f"in {show_seconds(round(progress.end.seconds or progress.end.time_s - start.time_s))}"
    if not run.state.is_under_way:
        return f"in {show_seconds(round(run.last_s - start.time_s))}"
    spent = show_seconds(max(1, round(now_s - start.time_s)))
    left_s = progress.remaining_s
    if not left_s or not math.isfinite(left_s):
        return spent
    at = time.strftime("%H:%M" if left_s < 86400 else "%a %H:%M", time.localtime(now_s + left_s))
    clock = f"{spent}, {show_seconds(max(1, round(left_s)))} left"
    return f"{clock}, ends {at}"


def tabs(at: int, canvas: Canvas) -> Text:
    """Return the line of the panes' names; the one that is shown is in brackets, and brighter."""
    parts: list[tuple[str, str]] = []
    for index, pane in enumerate(PANES):
        name = f"[{pane.name}]" if index == at else pane.name
        parts += [(name, "bold" if index == at else "dim"), (" " if canvas.width < 60 else "  ", "")]
    return canvas.line(*parts)
