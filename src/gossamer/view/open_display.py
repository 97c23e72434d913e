"""The choice of a display, and the guard that keeps its failures from stopping the run."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Literal, TextIO

from gossamer.spec.records import Record
from gossamer.view.display import Display
from gossamer.view.display.live import Live
from gossamer.view.display.notebook import Notebook, notebook_show
from gossamer.view.display.plain import Plain
from gossamer.view.display.quiet import Quiet

DisplayName = Literal["auto", "live", "plain", "quiet"]
_log = logging.getLogger(__name__)


def open_display(
    name: DisplayName = "auto",
    *,
    out: TextIO | None = None,
    title: str = "",
    environ: Mapping[str, str] = os.environ,
) -> Display:
    """Open the display called `name` on `out` (default: standard output). Its methods never raise.

    `auto` is a chart in a notebook, `live` on a terminal and `plain` elsewhere, under a CI service included. `live`
    needs a terminal that can move its cursor and show UTF-8; without one it is `plain`, too. NO_COLOR is honored.
    """
    out = out if out is not None else sys.stdout
    if name == "quiet":
        return Guarded(Quiet(out))
    if name == "auto" and (show := notebook_show()) is not None:
        return Guarded(Notebook(show, out, title=title))
    wanted = name == "live" or (name == "auto" and not environ.get("CI"))
    if wanted and _can_draw(out, environ):
        return Guarded(Live(out, title=title))
    return Guarded(Plain(out))


def _can_draw(out: TextIO, environ: Mapping[str, str]) -> bool:
    try:
        is_terminal = out.isatty()
    except (ValueError, OSError):  # closed
        return False
    encoding = (out.encoding or "").lower().replace("-", "")
    return is_terminal and environ.get("TERM", "dumb") not in ("", "dumb", "unknown") and encoding == "utf8"


class _Off(Display):
    """The display after a failure of the real one: it shows nothing."""

    def show(self, record: Record) -> None:
        pass

    def recall(self, record: Record) -> None:
        pass

    def tick(self) -> None:
        pass

    def close(self) -> None:
        pass


class Guarded(Display):
    """A display that may fail: its first failure closes it and is logged, and the run continues without it."""

    def __init__(self, inner: Display) -> None:
        self.inner = inner

    def show(self, record: Record) -> None:
        self._guard(lambda inner: inner.show(record))

    def recall(self, record: Record) -> None:
        self._guard(lambda inner: inner.recall(record))

    def tick(self) -> None:
        self._guard(lambda inner: inner.tick())

    def close(self) -> None:
        self._guard(lambda inner: inner.close())

    def _guard(self, act: Callable[[Display], None]) -> None:
        inner = self.inner
        try:
            act(inner)
        except (Exception, SystemExit) as error:  # whatever a terminal does, training is worth more
            self.inner = _Off()
            with suppress(Exception):
                inner.close()
            _log.warning("the display failed and is off, the training continues: %s: %s", type(error).__name__, error)
