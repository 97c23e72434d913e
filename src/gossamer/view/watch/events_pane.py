"""The panes of what a run says: its events, and the logs of its ranks."""

from __future__ import annotations

import time

from rich.text import Text

from gossamer.view.format import LEVELS
from gossamer.view.watch.canvas import Canvas
from gossamer.view.watch.watched_run import News, WatchedRun


def events(run: WatchedRun, canvas: Canvas) -> list[Text]:
    """All that the records say beside steps, the newest last."""
    if not run.news:
        return [canvas.line(("nothing has happened yet", "dim"))]
    return [line for news in run.news for line in _told(news, canvas)]


def _told(news: News, canvas: Canvas) -> list[Text]:
    """Return all that an event says, on as many lines as it needs."""
    first = headline(News(news.time_s, news.level, news.word, ""), canvas)
    if canvas.width < 60:
        return canvas.paragraph((first.plain.rstrip() + " ", _style(news, canvas)), news.text)
    indent = first.cell_len
    return canvas.paragraph((first.plain, _style(news, canvas)), " ".join(news.text.split()), indent=indent)


def _style(news: News, canvas: Canvas) -> str:
    return canvas.color(LEVELS.get(news.level, "")) if news.level != "info" else "dim"


def headline(news: News, canvas: Canvas) -> Text:
    """Return an event on one line, cut at the width of the canvas."""
    clock = time.strftime("%H:%M:%S" if canvas.width >= 60 else "%H:%M", time.localtime(news.time_s))
    sign = {"warning": "!", "error": "x"}.get(news.level, " ")
    style = _style(news, canvas)
    word = f"{news.word:<10}" if canvas.width >= 60 else news.word
    return canvas.line((f"{clock} ", "dim"), (f"{sign} ", style), (f"{word} ", style), " ".join(news.text.split()))


def logs(run: WatchedRun, canvas: Canvas) -> list[Text]:
    """The end of each rank's log, one after the other."""
    lines: list[Text] = []
    silent = []
    for rank in range(run.ranks):
        log = run.log(rank)
        if not log.lines:
            silent.append(rank)
            continue
        lines.append(canvas.line((f"rank {rank}", "bold"), ("  logs/" + log.file.name, "dim")))
        lines += [piece for line in log.lines for piece in canvas.paragraph(("  ", ""), line, indent=4)]
    if silent:
        lines += canvas.paragraph(("nothing in the log of rank ", "dim"), ", ".join(map(str, silent)), "dim")
    return lines or [canvas.line(("no logs yet", "dim"))]
