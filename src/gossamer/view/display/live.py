"""Live: one panel on a terminal, redrawn in place at most four times a second."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable
from typing import TextIO

from rich.console import Console
from rich.live import Live as Region

from gossamer.spec.records import End, Record
from gossamer.view.console import TerminalConsole
from gossamer.view.display import Display
from gossamer.view.live_panel import panel
from gossamer.view.progress import RunProgress

EVERY_S = 1 / 4  # a drawing takes about 3 ms of a core


class Live(Display):
    """The live display: one panel, redrawn in the caller's thread by `show` and `tick`.

    `close`, at exit at the latest, restores the terminal.
    """

    def __init__(
        self,
        out: TextIO,
        *,
        title: str = "",
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._console = console if console is not None else TerminalConsole(file=out, highlight=False)
        self._title = title
        self._clock = clock
        self._now = now
        self._opened_s = now()
        self._progress = RunProgress()
        self._drawn_s: float | None = None
        self._region: Region | None = None
        self._closed = False

    def recall(self, record: Record) -> None:
        self._progress.add(record)

    def show(self, record: Record) -> None:
        self._progress.add(record)
        self._draw_when_due(now=isinstance(record, End))

    def tick(self) -> None:
        self._draw_when_due(now=False)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        if self._region is None:
            return
        self._region.transient = self._progress.start is None  # nothing happened: leave nothing behind
        try:
            self._draw()
        finally:
            self._region.stop()

    def _draw_when_due(self, *, now: bool) -> None:
        time_s = self._clock()
        if self._closed or not (now or self._drawn_s is None or time_s - self._drawn_s >= EVERY_S):
            return
        self._drawn_s = time_s
        self._draw()

    def _draw(self) -> None:
        if self._region is None:
            atexit.register(self.close)
            self._region = Region(console=self._console, auto_refresh=False, vertical_overflow="crop")
            self._region.start()
        width, height = self._console.size
        drawing = panel(
            self._progress,
            width=width,
            height=height,
            now_s=self._now(),
            opened_s=self._opened_s,
            title=self._title,
        )
        self._region.update(drawing, refresh=True)
