"""The panes of what a step costs: bytes by link, and the forecast of the plan beside what was measured."""

from __future__ import annotations

from collections.abc import Callable

from rich.text import Text

from gossamer.spec.units import show_bytes, show_gib, show_rate, show_seconds
from gossamer.view.format import show_share
from gossamer.view.summary import forecast_error
from gossamer.view.watch.canvas import Canvas, Column, table
from gossamer.view.watch.watched_run import WatchedRun


def links(run: WatchedRun, canvas: Canvas) -> list[Text]:
    """A row per link that the recording rank sends over: bytes per step and second, by forecast, and in all."""
    recent = run.progress.pace.link_bytes
    forecast = run.plan.forecast.wire_bytes if run.plan is not None else {}
    names = sorted({*run.sent_bytes, *recent, *forecast}, key=lambda name: (-run.sent_bytes.get(name, 0), name))
    if not names:
        return [canvas.line(("no bytes were sent: one rank, or no step yet", "dim"))]
    empty = (None, None)
    pace = [recent.get(name, empty) for name in names]
    columns = [
        Column("link", names, 9, is_text=True),
        Column("a step", [_or(show_bytes, one[0]) for one in pace], 8),
        Column("rate", [_or(show_rate, one[1]) for one in pace], 7),
        Column("forecast", [_or(show_bytes, forecast.get(name)) for name in names], 5),
        Column("in all", [_or(show_bytes, run.sent_bytes.get(name)) for name in names], 6),
    ]
    exposed = run.progress.pace.exposed_share
    lines = table(columns, canvas)
    if exposed is not None:
        lines.append(canvas.line(f"exposed communication: {show_share(exposed)} of the step"))
    notes = ("measured where rank 0 sends; other links have their forecast",)
    return [*lines, Text(), *(canvas.line((note, "dim")) for note in notes)]


def _or(show: Callable[[float], str], value: float | None) -> str:
    return "-" if value is None else show(value)


def forecast(run: WatchedRun, canvas: Canvas) -> list[Text]:
    """What the plan has forecast of a step, beside what the recent steps took; and why the plan is as it is."""
    if run.plan is None:
        return canvas.paragraph(("", ""), run.unread.get("plan.yaml", "no plan.yaml yet"), "dim")
    said, was = run.plan.forecast, run.progress.pace.cost(run.progress.peak_bytes)
    error = forecast_error(said, was)
    rows = [
        (name, _time(getattr(said, key)), _time(getattr(was, key)), _share(error.get(key)))
        for name, key in (("step", "step_s"), ("computing", "compute_s"), ("exposed", "exposed_s"))
    ]
    memory = said.peak_bytes[0] if said.peak_bytes else 0
    rows.append(("memory", _memory(memory), _memory(run.progress.peak_bytes), _share(error.get("peak_bytes"))))
    for link in sorted(was.wire_bytes):
        one = said.wire_bytes.get(link)
        rows.append((f"link {link}", _or(show_bytes, one), show_bytes(was.wire_bytes[link]),
                     _share(error.get(f"wire_bytes {link}"))))  # fmt: skip
    heads = ("of a step", "forecast", "measured", "off by")
    cells = [[row[at] for row in rows] for at in range(len(heads))]
    columns = [Column(one, cells[at], 9 - at, is_text=at == 0) for at, one in enumerate(heads)]
    lines = table(columns, canvas)
    if not said.step_s:
        lines.append(canvas.line(("the plan has no forecast of times: nothing was measured for it", "dim")))
    why = [line for one in run.plan.reasons.items() for line in canvas.paragraph((f"{one[0]}: ", "dim"), one[1])]
    return [*lines, Text(), *([canvas.line("why this plan")] if why else []), *why]


def _time(seconds: float) -> str:
    return show_seconds(seconds) if seconds > 0 else "-"


def _memory(count: int) -> str:
    return show_gib(count) if count else "-"


def _share(error: float | None) -> str:
    return "-" if error is None else f"{100 * error:+.0f}%"
