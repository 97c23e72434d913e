"""`gossamer watch` on a terminal, driven by textual's pilot: what its keys do, and that it follows what is appended."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from gossamer.view.watch.canvas import ASCII, UNICODE, Glyphs
from gossamer.view.watch.panes import PANES
from gossamer.view.watch.watched_run import WatchedRun
from view.streams import run, start, step
from view.test_watch import PLAN, written

pytest.importorskip("textual")

from gossamer.view.watch.app import HELP, WatchApp

Look = Callable[["WatchApp", Any], Awaitable[None]]


def on_terminal(
    folder: Path, look: Look, *, width: int = 80, height: int = 24, glyphs: Glyphs = UNICODE, now_s: float = 70.0
) -> None:
    """Open the application on the run in `folder`, and do `look` with it and its pilot."""

    async def live() -> None:
        app = WatchApp(WatchedRun(written(folder, [])), glyphs=glyphs, now=lambda: now_s, every_s=0.02)
        async with app.run_test(size=(width, height)) as pilot:
            await pilot.pause()
            await look(app, pilot)

    asyncio.run(live())


def screen(app: WatchApp) -> list[str]:
    """The lines of the terminal, without the blanks at their ends."""
    strips = app.screen._compositor.render_strips()
    return ["".join(segment.text for segment in strip).rstrip() for strip in strips]


async def until(pilot: Any, holds: Callable[[], bool]) -> None:
    """Wait until something holds: the application reads by itself."""
    for _ in range(500):
        if holds():
            return
        await pilot.pause(0.02)
    raise AssertionError("it did not come to hold in 10 s")


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
@pytest.mark.parametrize("width", [40, 80, 120])
def test_every_pane_fits_on_the_terminal(tmp_path: Path, width: int, glyphs: Glyphs) -> None:
    written(tmp_path, run(until=137, ends=False), plan=PLAN)

    async def look(app: WatchApp, pilot: Any) -> None:
        for pane in PANES:
            shown = screen(app)
            assert shown[1].startswith("step 137 / 200") and f"[{pane.name}]" in shown[2]
            assert shown[-1] == "q quit  tab pane  p pause  ? help" and shown[4]
            assert glyphs is UNICODE or "".join(shown).isascii()
            await pilot.press("tab")
        assert "[Run]" in screen(app)[2]  # around

    on_terminal(tmp_path, look, width=width, glyphs=glyphs)


def test_the_screen_of_a_run(tmp_path: Path) -> None:
    written(tmp_path / "20261125-llama", run(until=137, ends=False), plan=PLAN)

    async def look(app: WatchApp, pilot: Any) -> None:
        assert [re.sub(r"^\d\d:\d\d:\d\d", "(clock)", line[:39]).rstrip() for line in screen(app)] == [
            " running  20261125-llama",
            "step 137 / 200 " + "\u2501" * 21 + "\u2500" * 3,
            "[Run]  Ranks  Links  Forecast  Events",
            "",
            "llama, 3.15M parameters",
            "stdlib on 2 ranks, dense exchange",
            "4.1k tokens a step",
            "",
            "loss        1.6221  nats/token",
            "validation  1.7991  2.596 bits/byte",
            "tokens/s    8.19k  500 ms a step",
            "arithmetic  31%  of measured peak",
            "sent        12.6 MB/step  202 Mbit/s",
            "exposed     8.0%  of the step waits",
            "memory      412 MiB  peak, first rank",
            "learn rate  3.00e-04",
            "gradient    1.25  norm",
            "checkpoint  step 100, 37.8 MB",
            "",
            "(clock)   validation loss 2.3966, 3.45",
            "(clock) ! warning    step 60, rank 1:",
            "(clock)   validation loss 1.7991, 2.59",
            "",
            "q quit  tab pane  p pause  ? help",
        ]

    on_terminal(tmp_path / "20261125-llama", look)


def test_keys(tmp_path: Path) -> None:
    written(tmp_path, run(until=137, ends=False), plan=PLAN)

    async def look(app: WatchApp, pilot: Any) -> None:
        for key, pane in (
            ("right", "Ranks"),
            ("left", "Run"),
            ("shift+tab", "Logs"),
            ("4", "Forecast"),
            ("tab", "Events"),
        ):
            await pilot.press(key)
            assert f"[{pane}]" in screen(app)[2]
        await pilot.press("question_mark")
        assert all(any(said in line for line in screen(app)) for _, said in HELP)
        await pilot.press("escape")
        assert not any(HELP[0][1] in line for line in screen(app))
        await pilot.press("q")
        assert not app.is_running

    on_terminal(tmp_path, look)


def test_it_follows_and_pauses(tmp_path: Path) -> None:
    written(tmp_path, run(until=10, ends=False))

    async def look(app: WatchApp, pilot: Any) -> None:
        written(tmp_path, [step(11)])
        await until(pilot, lambda: screen(app)[1].startswith("step 11 /"))
        await pilot.press("p")
        written(tmp_path, [step(12)])
        await pilot.pause(0.2)
        assert screen(app)[0].startswith(" paused ") and screen(app)[1].startswith("step 11 /")
        await pilot.press("p")
        await until(pilot, lambda: screen(app)[1].startswith("step 12 /"))

    on_terminal(tmp_path, look, now_s=6.0)


def test_it_follows_from_an_empty_folder_to_the_end_and_to_a_resumed_run(tmp_path: Path) -> None:
    async def look(app: WatchApp, pilot: Any) -> None:
        assert screen(app)[0].startswith(" empty ")
        written(tmp_path, run(20))
        await until(pilot, lambda: screen(app)[0].startswith(" done "))
        written(tmp_path, [start(20, 40, time_s=10.0), step(21)])
        await until(pilot, lambda: screen(app)[1].startswith("step 21 / 40"))
        assert screen(app)[0].startswith(" running ")

    on_terminal(tmp_path, look, now_s=11.0)


def test_the_newest_event_stays_in_sight(tmp_path: Path) -> None:
    written(tmp_path, run(10**4, until=2000, ends=False))  # 60 events, of which 14 lines fit

    async def look(app: WatchApp, pilot: Any) -> None:
        await pilot.press("5")
        await until(pilot, lambda: any("step 2000" in line for line in screen(app)))
        written(tmp_path, list(run(10**4, until=2050, first=2000, ends=False)))
        await until(pilot, lambda: any("step 2050" in line for line in screen(app)))
        await pilot.press("home")
        await until(pilot, lambda: any("start" in line for line in screen(app)))

    on_terminal(tmp_path, look, height=20)
