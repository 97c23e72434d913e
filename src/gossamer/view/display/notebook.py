"""Notebook: a chart of the losses below the cell, which is drawn anew while the run goes on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TextIO

from gossamer.spec.records import End, Event, Record
from gossamer.view.display import Display
from gossamer.view.display.quiet import Quiet
from gossamer.view.loss_chart import chart
from gossamer.view.progress import RunProgress

Show = Callable[..., Any]  # IPython.display.display: a handle with `update`, when it is called with display_id=True


class Notebook(Display):
    """The display of a notebook: one picture, at most every `every_s` seconds of the run's own time, and warnings."""

    def __init__(self, show: Show, out: TextIO, *, title: str = "", every_s: float = 1.0) -> None:
        self._show, self._title, self._every_s = show, title, every_s
        self._progress = RunProgress()
        self._words = Quiet(out)
        self._handle: Any = None
        self._drawn_s = 0.0  # time of the record that was drawn last

    def recall(self, record: Record) -> None:
        self._progress.add(record)

    def show(self, record: Record) -> None:
        self._progress.add(record)
        if isinstance(record, (Event, End)):
            self._words.show(record)
        if isinstance(record, End) or record.time_s - self._drawn_s >= self._every_s:
            self._draw()
            self._drawn_s = record.time_s

    def tick(self) -> None:
        pass

    def close(self) -> None:
        if self._handle is not None:
            self._draw()

    def _draw(self) -> None:
        picture = {"image/svg+xml": chart(self._progress, title=self._title)}
        if self._handle is None:
            self._handle = self._show(picture, raw=True, display_id=True)
        else:
            self._handle.update(picture, raw=True)


def notebook_show() -> Show | None:
    """Return `IPython.display.display` where this process is the kernel of a notebook; None elsewhere.

    IPython is not imported: a kernel has done so already.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    if shell is None or getattr(shell, "kernel", None) is None:
        return None
    from IPython.display import display

    found: Show = display
    return found
