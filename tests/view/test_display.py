"""What the displays put out, and that none of them can hurt a run."""

from __future__ import annotations

import dataclasses
import io
import logging
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console

from gossamer.spec.records import Event, Record, Saved
from gossamer.view.display import Display
from gossamer.view.display.live import EVERY_S, Live
from gossamer.view.display.plain import Plain
from gossamer.view.display.quiet import Quiet
from gossamer.view.live_panel import panel
from gossamer.view.open_display import Guarded, open_display
from gossamer.view.progress import RunProgress
from view.streams import run, start, step


class Terminal(io.StringIO):
    """A stream that says it is a terminal of this encoding."""

    encoding = "utf-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True


def lines(display: Display, out: io.StringIO, records: list[Record]) -> list[str]:
    for record in records:
        display.show(record)
    display.close()
    return out.getvalue().splitlines()


def drawn(width: int, height: int, *, until: int = 200) -> list[str]:
    progress = RunProgress()
    for record in run(until=until, ends=until == 200):
        progress.add(record)
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(panel(progress, width=width, height=height, now_s=until / 2, title="20261009-120102-llama"))
    return console.export_text().splitlines()


def test_plain_is_throttled_by_the_time_of_the_run() -> None:
    out = io.StringIO()
    shown = lines(Plain(out, every_s=5.0), out, list(run(200)))
    steps = [line for line in shown if line[9:14] == "step "]
    assert len(steps) == 21  # the first, one every 5 s of 100 s, the last among them
    assert "1/200" in steps[0] and "200/200" in steps[-1]
    assert len({line.index("loss") for line in steps}) == len({line.index("tok/s") for line in steps}) == 1


def test_plain_says_the_unit_of_the_loss_where_it_is_known() -> None:
    known, unknown = start(), dataclasses.replace(start(), loss_unit="")
    for record, said in (
        (known, "200 steps of 4.1k tokens, loss in nats/token"),
        (unknown, "200 steps of 4.1k tokens"),
    ):
        out = io.StringIO()
        assert lines(Plain(out), out, [record])[1].endswith(said)


def test_plain_says_once_that_it_waits_for_the_processes() -> None:
    out = io.StringIO()
    plain = Plain(out)
    for _ in range(3):
        plain.tick()
    shown = lines(plain, out, [start()])
    plain.tick()
    assert [line[9:] for line in shown[:1]] == ["starting   processes, data, model"]
    assert [line[9:17].strip() for line in shown] == ["starting", "start", ""]


@pytest.mark.parametrize("word", ["start", "validation", "checkpoint", "warning", "sample", "done"])
def test_plain_always_shows_what_is_no_step(word: str) -> None:
    out = io.StringIO()
    shown = lines(Plain(out, every_s=1e9), out, list(run(200)))
    assert [line for line in shown if line[9:].startswith(word)]


def test_plain_does_not_repeat_what_it_recalls() -> None:
    out = io.StringIO()
    plain = Plain(out)
    for record in run(200, until=50, ends=False):
        plain.recall(record)
    shown = lines(plain, out, [start(50, time_s=25.0), step(51)])
    assert [line[9:15] for line in shown] == ["resume", "      ", "step  "]


def test_quiet_says_only_what_is_wrong() -> None:
    out = io.StringIO()
    failed = Saved(step=3, path="x", bytes=0, copy_s=0.0, write_s=0.0, error="no space left")
    info = Event(level="info", message="fine")
    assert lines(Quiet(out), out, [*run(100), info, failed]) == [
        "warning: step 60, rank 1: loss was nan: step rejected",
        "warning: not saved at step 3: no space left",
    ]


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
@pytest.mark.parametrize("height", [10, 16, 24, 60])
@pytest.mark.parametrize("until", [0, 1, 2, 137, 200])
def test_the_panel_fits(width: int, height: int, until: int) -> None:
    shown = drawn(width, height, until=until)
    assert max(map(len, shown)) <= width
    assert len(shown) <= max(13, min(height - 1, 22))  # below 14 lines it is cropped


def test_the_panel_tells_what_a_run_is_judged_by() -> None:
    text = "\n".join(drawn(80, 24, until=137))
    for figure in ("137 / 200", "left", "bits/byte", "8.19k", "of measured peak", "12.6 MB/step", "202 Mbit/s"):
        assert figure in text
    assert re.search(r"loss +1\.\d{4} +nats/token", text)
    for figure in ("8.0%", "412 MiB", "3.00e-04", "1.25", "step 100, 37.8 MB", "loss was nan", "20261009-120102"):
        assert figure in text


def test_a_message_is_text_and_no_markup() -> None:
    progress = RunProgress()
    for record in (start(), Event(level="error", message="[/bold] tensor[0]\nand more")):
        progress.add(record)
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(panel(progress, width=80, height=24, now_s=1.0))
    assert "[/bold] tensor[0] and more" in console.export_text()


def test_live_draws_at_most_so_often() -> None:
    seconds = 0.0
    out = Terminal()
    console = Console(file=out, force_terminal=True, width=80, height=24)
    live = Live(out, console=console, clock=lambda: seconds, now=lambda: seconds)
    drawings = []
    for record in run(200, until=100, ends=False):
        live.show(record)
        drawings.append(len(out.getvalue()))
        seconds += EVERY_S / 4
    live.close()
    assert 25 <= len(set(drawings)) <= 27
    assert out.getvalue().endswith("\x1b[?25h")  # the cursor is back
    drawn_at_close = len(out.getvalue())
    live.close()
    live.show(step(101))
    assert len(out.getvalue()) == drawn_at_close


def test_live_shows_how_long_a_start_takes() -> None:
    now = 1000.0
    out = Terminal()
    console = Console(file=out, force_terminal=True, width=80, height=24)
    live = Live(out, console=console, clock=lambda: now, now=lambda: now)
    now += 75.0
    live.tick()
    assert "starting: processes, data, model  1m15s" in out.getvalue()
    live.close()


def test_live_leaves_nothing_behind_where_nothing_began() -> None:
    out = Terminal()
    live = Live(out, console=Console(file=out, force_terminal=True, width=80, height=24))
    live.tick()
    shown = out.getvalue()
    assert shown.count("\n") == 2  # three lines
    live.close()
    assert out.getvalue()[len(shown) :].count("\x1b[2K") >= 3  # and three cleared
    assert out.getvalue().endswith("\x1b[2K")


@pytest.mark.parametrize(
    ("name", "environ", "kind"),
    [
        ("auto", {"TERM": "xterm"}, Live),
        ("auto", {"TERM": "xterm", "NO_COLOR": "1"}, Live),
        ("auto", {"TERM": "xterm", "CI": "true"}, Plain),
        ("live", {"TERM": "xterm", "CI": "true"}, Live),
        ("auto", {"TERM": "dumb"}, Plain),
        ("auto", {}, Plain),
        ("plain", {"TERM": "xterm"}, Plain),
        ("quiet", {"TERM": "xterm"}, Quiet),
    ],
)
def test_the_choice_on_a_terminal(name: str, environ: dict[str, str], kind: type[Display]) -> None:
    display = open_display(name, out=Terminal(), environ=environ)  # type: ignore[arg-type]
    assert isinstance(display, Guarded) and type(display.inner) is kind


@pytest.mark.parametrize("name", ["auto", "live"])
def test_a_pipe_gets_plain_lines(name: str, tmp_path: Path) -> None:
    with (tmp_path / "log").open("w", encoding="utf-8") as out:
        display = open_display(name, out=out, environ={"TERM": "xterm"})  # type: ignore[arg-type]
        assert isinstance(display, Guarded) and type(display.inner) is Plain


def test_no_color_means_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    out = Terminal()
    shown = "\n".join(lines(open_display("live", out=out, environ={"TERM": "xterm"}), out, list(run(20))))
    assert "tokens/s" in shown and "38;5;" not in shown


class Broken(Terminal):
    """A terminal that goes away after a while."""

    def __init__(self, good: int) -> None:
        super().__init__()
        self.good = good

    def write(self, text: str) -> int:
        self.good -= 1
        if self.good < 0:
            raise BrokenPipeError("gone")
        return super().write(text)


@pytest.mark.parametrize("good", [0, 1, 3])
@pytest.mark.parametrize("name", ["live", "plain", "quiet"])
def test_a_broken_terminal_costs_the_display_and_nothing_else(
    name: str, good: int, caplog: pytest.LogCaptureFixture
) -> None:
    display = open_display(name, out=Broken(good), environ={"TERM": "xterm"})  # type: ignore[arg-type]
    warning, stdout, stderr = Event(level="warning", message="x"), sys.stdout, sys.stderr
    with caplog.at_level(logging.WARNING):
        for record in [*run(200), *[warning] * 10]:
            display.show(record)
            display.tick()
        display.close()
    assert len([said for said in caplog.messages if "display failed" in said]) == 1
    assert sys.stdout is stdout and sys.stderr is stderr
