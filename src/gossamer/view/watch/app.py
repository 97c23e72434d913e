"""The terminal application of `gossamer watch`: a head, one pane at a time, a line of keys. Needs textual."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.events import Resize
from textual.widgets import Static

from gossamer.view.watch.canvas import UNICODE, Canvas, Glyphs
from gossamer.view.watch.panes import PANES, head, tabs
from gossamer.view.watch.watched_run import WatchedRun

EVERY_S = 2.0  # between two readings, at least: one takes about 10 ms of a core
LONGEST_S = 6.0  # between two readings, on a slow machine
SHARE = 0.008  # of a core, that looking on may take
BEHIND_S = 0.02  # between two readings of a long run's first records
KEYS = "q quit  tab pane  p pause  ? help"
HELP = (
    ("q, ctrl-c", "quit; the run goes on"),
    ("tab, right", "next pane"),
    ("shift-tab, left", "pane before"),
    ("1 to 6", "that pane"),
    ("up, down", "scroll by a line"),
    ("page up, down", "scroll by a screen"),
    ("home, end", "first line, last line"),
    ("p", "pause: read no more until p again"),
    ("?", "this help, and back"),
)


class WatchApp(App[None]):  # type: ignore[misc]  # where textual is not installed
    """A run on the terminal. It reads files alone, and ends with a key or with its terminal, never with the run."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { background: ansi_default; color: ansi_default; }
    #head, #tabs, #keys { height: auto; width: 100%; background: ansi_default; }
    #scroll { height: 1fr; background: ansi_default; scrollbar-size-horizontal: 0; scrollbar-size-vertical: 0;
              margin: 1 0; }
    #body { width: 100%; height: auto; background: ansi_default; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit"),
        Binding("ctrl+c", "quit", priority=True),
        Binding("tab,right", "turn(1)", priority=True),
        Binding("shift+tab,left", "turn(-1)", priority=True),
        *(Binding(str(number), f"show({number - 1})") for number in range(1, len(PANES) + 1)),
        Binding("p", "pause"),
        Binding("question_mark", "help"),
        Binding("escape", "back"),
    ]

    def __init__(
        self,
        run: WatchedRun,
        *,
        glyphs: Glyphs = UNICODE,
        has_color: bool = True,
        now: Callable[[], float] = time.time,
        every_s: float = EVERY_S,
    ) -> None:
        super().__init__(ansi_color=True)
        self._run_read = run
        self._glyphs = glyphs
        self._has_color = has_color
        self._now = now
        self._every_s = every_s
        self._at = 0
        self._is_paused = False
        self._is_help = False
        self._paused_s = 0.0
        self._spent_s = time.process_time()  # by this process, when it last drew
        self._shown: dict[str, Text] = {}

    def compose(self) -> ComposeResult:
        yield Static(id="head", markup=False)
        yield Static(id="tabs", markup=False)
        with VerticalScroll(id="scroll"):
            yield Static(id="body", markup=False)
        yield Static(id="keys", markup=False)

    def on_mount(self) -> None:
        self.query_one("#scroll").focus()
        self._look()

    def on_resize(self, event: Resize) -> None:
        self._draw()

    def action_turn(self, by: int) -> None:
        """Show the next pane, or the one before."""
        self.action_show((self._at + by) % len(PANES))

    def action_show(self, pane: int) -> None:
        """Show a pane, by its number from 0."""
        self._at, self._is_help = pane, False
        self._draw()
        scroll = self.query_one("#scroll", VerticalScroll)
        self.call_after_refresh(scroll.scroll_end if PANES[pane].is_tail else scroll.scroll_home, animate=False)

    def action_pause(self) -> None:
        """Stop reading, or go on with all that was added meanwhile."""
        self._is_paused = not self._is_paused
        self._paused_s = self._now()
        if not self._is_paused:
            self._run_read.read(self._now())
        self._draw()

    def action_help(self) -> None:
        """Show the keys, or the pane again."""
        self._is_help = not self._is_help
        self._draw()

    async def action_back(self) -> None:
        """Leave the help."""
        self._is_help = False
        self._draw()

    def _look(self) -> None:
        """Read, draw, and come again: soon where a long run has more to read."""
        if not self._is_paused:
            self._run_read.read(self._now())
            self._draw()
        self.set_timer(self._pause_s(), self._look)

    def _pause_s(self) -> float:
        """Return the seconds until the next reading: as many as keep this process below SHARE of a core."""
        spent_s, self._spent_s = self._spent_s, time.process_time()
        if self._run_read.is_behind and not self._is_paused:
            return BEHIND_S
        return max(self._every_s, min(LONGEST_S, (self._spent_s - spent_s) / SHARE))

    def _draw(self) -> None:
        canvas = Canvas(max(20, self.size.width), self._glyphs, self._has_color)
        now_s = self._paused_s if self._is_paused else self._now()
        scroll = self.query_one("#scroll", VerticalScroll)
        is_at_end = PANES[self._at].is_tail and scroll.scroll_y >= scroll.max_scroll_y
        self._put("head", head(self._run_read, canvas, now_s=now_s, is_paused=self._is_paused))
        self._put("tabs", [tabs(self._at, canvas)])
        self._put("body", _help(canvas) if self._is_help else PANES[self._at].lines(self._run_read, canvas))
        self._put("keys", [canvas.line((KEYS, "dim"))])
        if is_at_end and not self._is_help:
            self.call_after_refresh(scroll.scroll_end, animate=False)

    def _put(self, name: str, lines: list[Text]) -> None:
        """Show the lines in a widget, where they differ from what it shows: most of them seldom change."""
        text, before = Text("\n", no_wrap=True).join(lines), self._shown.get(name)
        if before is not None and text.plain == before.plain and text.spans == before.spans:
            return
        self._shown[name] = text
        is_same_size = before is not None and before.plain.count("\n") == text.plain.count("\n")
        self.query_one(f"#{name}", Static).update(text, layout=not is_same_size)


def _help(canvas: Canvas) -> list[Text]:
    return [canvas.line((f"{key:<16}", "bold"), said) for key, said in HELP]
