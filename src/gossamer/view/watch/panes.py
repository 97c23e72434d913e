"""What `gossamer watch` shows, as lines of text: a head for all panes, and each pane."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from rich.text import Text

from gossamer.spec.cost import Cost
from gossamer.spec.units import show_bytes, show_gib, show_rate, show_seconds
from gossamer.view.format import (
    ACCENT,
    BAD,
    GOOD,
    LEVELS,
    SECOND,
    WARN,
    format_evaluation,
    model_words,
    saved_words,
    setting_words,
    show_count,
    show_share,
)
from gossamer.view.summary import forecast_error
from gossamer.view.watch.canvas import Canvas, Column, table
from gossamer.view.watch.chart import chart
from gossamer.view.watch.liveness import RunState
from gossamer.view.watch.watched_run import News, WatchedRun

BESIDE = 76  # columns from which the curve stands beside the figures
FIGURES = 38  # columns of the figures there
LABEL = 11
NEWEST = 4  # events in the first pane
CHART_ROWS = 10
COLORS = {"done": GOOD, "interrupted": WARN, "failed": BAD, "crashed": BAD, "gone": BAD, "silent": WARN}


@dataclass(frozen=True, slots=True)
class Pane:
    """A pane: its name, and its lines for a run. `is_tail`: its newest line is the last, and is what one wants."""

    name: str
    lines: Callable[[WatchedRun, Canvas], list[Text]]
    is_tail: bool = False


def head(run: WatchedRun, canvas: Canvas, *, now_s: float, is_paused: bool = False) -> list[Text]:
    """Return two lines: the state and name of the run, and how far it is."""
    state = run.state(now_s)
    word = "paused" if is_paused else state.word
    style = canvas.color(WARN if is_paused else COLORS.get(state.word, ACCENT))
    about = run.directory.name
    if run.last_s and state.word in ("crashed", "silent", "gone"):
        about += f", last record {show_seconds(max(1, round(now_s - run.last_s)))} ago"
    return [canvas.line((f" {word} ", f"bold reverse {style}".strip()), " ", about), _stroke(run, state, canvas, now_s)]


def _stroke(run: WatchedRun, state: RunState, canvas: Canvas, now_s: float) -> Text:
    progress = run.progress
    if progress.start is None:
        said = state.why if state.word not in ("starting", "running") else "processes, data, model"
        return canvas.line((said or state.word, "dim"))
    count = f"step {progress.steps_done:,} / {progress.steps:,}"
    after = f"{show_share(progress.fraction)}  {_clock(run, state, now_s)}"
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


def _clock(run: WatchedRun, state: RunState, now_s: float) -> str:
    progress, start = run.progress, run.progress.start
    assert start is not None
    if progress.end is not None:
        return f"in {show_seconds(round(progress.end.seconds or progress.end.time_s - start.time_s))}"
    if not state.is_under_way:
        return f"in {show_seconds(round(run.last_s - start.time_s))}"
    spent = show_seconds(max(1, round(now_s - start.time_s)))
    left_s = progress.remaining_s
    if not left_s or not math.isfinite(left_s):
        return spent
    at = time.strftime("%H:%M" if left_s < 86400 else "%a %H:%M", time.localtime(now_s + left_s))
    clock = f"{spent}, {show_seconds(max(1, round(left_s)))} left"
    return f"{clock}, ends {at}"


def overview(run: WatchedRun, canvas: Canvas) -> list[Text]:
    """The figures that a run is judged by, its loss curve, and the newest events."""
    start = run.progress.start
    lines = [] if start is None else [canvas.line((words, "dim")) for words in (model_words(start), setting_words(start))]
    if start is not None and start.tokens_per_step:
        lines.append(canvas.line((f"{show_count(start.tokens_per_step)} tokens a step, {start.precision}", "dim")))
    figures = _figures(run, canvas.narrower(FIGURES) if canvas.width >= BESIDE else canvas)
    curve = run.progress.losses, run.progress.evaluations
    if canvas.width >= BESIDE:
        drawn = chart(*curve, canvas.narrower(canvas.width - FIGURES - 2), rows=max(CHART_ROWS, len(figures)))
        lines += ["", *_beside(figures, drawn)]  # type: ignore[list-item]
    else:
        drawn = chart(*curve, canvas, rows=CHART_ROWS)
        lines += [Text(), *figures, *([Text(), *drawn] if drawn else [])]
    lines = [line if isinstance(line, Text) else Text(line) for line in lines]
    newest = [news for news in run.news if news.word not in ("start", "")][-NEWEST:]
    said = [_news(news, canvas) for news in newest]
    return [*lines, *([Text(), *said] if said else [])]


def _beside(left: list[Text], right: list[Text]) -> list[Text]:
    lines = []
    for row in range(max(len(left), len(right))):
        line = left[row].copy() if row < len(left) else Text()
        if row < len(right):
            line.pad_right(max(0, FIGURES + 2 - line.cell_len))
            line = Text.assemble(line, right[row], no_wrap=True)
        lines.append(line)
    return lines


def _figures(run: WatchedRun, canvas: Canvas) -> list[Text]:
    progress = run.progress
    pace, step = progress.pace, progress.step
    rows: list[Text] = []

    def row(label: str, value: str, note: str = "", style: str = "") -> None:
        parts = [(f"{label:<{LABEL}} ", "dim"), (value, style)]
        rows.append(canvas.line(*parts, *([(f"  {note}", "dim")] if note else [])))

    if pace.loss is not None:
        unit = progress.start.loss_unit if progress.start is not None else ""
        row("loss", f"{pace.loss:.4f}", unit, f"bold {canvas.color(ACCENT)}".strip())
    if progress.evaluations:
        last = progress.evaluations[-1]
        row("validation", format_evaluation(last), f"at {last.step:,}", f"bold {canvas.color(SECOND)}".strip())
    if pace.tokens_per_s is not None and pace.step_s is not None:
        row("tokens/s", show_count(pace.tokens_per_s), f"{show_seconds(pace.step_s)} a step")
    if (share := progress.of_peak) is not None:
        row("arithmetic", show_share(share), "of measured peak")
    if pace.link_bytes:
        per_step, per_s = (sum(one[i] for one in pace.link_bytes.values()) for i in (0, 1))
        row("sent", f"{show_bytes(per_step)}/step", show_rate(per_s))
    if pace.link_bytes and (exposed := pace.exposed_share) is not None:
        row("exposed", show_share(exposed), "of the step waits", canvas.color(WARN) if exposed > 0.25 else "")
    if progress.peak_bytes:
        row("memory", show_gib(progress.peak_bytes), "peak, first rank")
    if step is not None:
        row("learn rate", f"{step.lr:.2e}")
        row("gradient", f"{step.grad_norm:.3g}", "norm")
    if progress.rejected:
        row("rejected", f"{progress.rejected:,}", "steps", canvas.color(WARN))
    saved = progress.saves.failed or progress.saves.saved
    if saved is not None:
        row("checkpoint", saved_words(saved), style=canvas.color(BAD) if saved.error else "")
    return rows


def ranks(run: WatchedRun, canvas: Canvas) -> list[Text]:
    """A row per rank: its host, its part, its rows of a batch, what it holds and sends by forecast, its log."""
    count = run.ranks
    if not count:
        return [canvas.line(("no rank is known yet: the run has not started", "dim"))]
    plan = run.plan if run.plan is not None and run.plan.ranks == count else None
    cells: dict[str, list[str]] = {name: [] for name in ("rank", "host", "part", "rows", "loss", "memory", "sends", "log")}
    for rank in range(count):
        host, log = run.host_of(rank), run.log(rank)
        cells["rank"].append(f"{rank}")
        cells["host"].append("?" if host is None else f"{host}")
        cells["part"].append("" if plan is None else _part(plan.axes.place(rank), plan.mesh.in_stages))
        replica = plan.axes.place(rank)[0] if plan is not None else 0
        cells["rows"].append("" if plan is None else f"{plan.rows[replica]}")
        cells["loss"].append(_loss_of(run, rank))
        forecast = plan.forecast if plan is not None else Cost()
        cells["memory"].append(show_gib(forecast.state_bytes[rank]) if rank < len(forecast.state_bytes) else "-")
        cells["sends"].append(show_bytes(forecast.sent_bytes[rank]) if rank < len(forecast.sent_bytes) else "-")
        cells["log"].append(log.lines[-1] if log.lines else "-")
    needed = {"rank": 9, "host": 8, "part": 4, "rows": 3, "loss": 6, "memory": 5, "sends": 5, "log": 1}
    if not any(cells["loss"]):
        del cells["loss"]
    texts = ("part", "log")
    lines = table([Column(name, rows, needed[name], name in texts) for name, rows in cells.items()], canvas)
    hosts = {run.host_of(rank) for rank in range(count)} - {None}
    said = f"{count} ranks" + (f" on {len(hosts)} host{'s' * (len(hosts) != 1)}" if hosts else "; hosts are not in the records")
    notes = [
        "memory, sends: by forecast, between steps and per step",
        f"measured on rank 0: {show_gib(run.progress.peak_bytes)} peak" if run.progress.peak_bytes else "",
    ]
    return [canvas.line(said), *lines, Text(), *(canvas.line((note, "dim")) for note in notes if note)]


def _part(place: tuple[int, int], in_stages: bool) -> str:
    replica, stage = place
    return f"replica {replica}, stage {stage}" if in_stages else f"replica {replica}"


def _loss_of(run: WatchedRun, rank: int) -> str:
    """Return the loss of the replica group of a rank in local-update training; "" in other runs."""
    plan, islands = run.plan, run.islands
    if plan is None or islands is None:
        return ""
    groups = plan.islands or tuple((one,) for one in range(plan.ranks))
    at = next((index for index, group in enumerate(groups) if rank in group), -1)
    if not 0 <= at < len(islands.losses):
        return ""
    rejected = f" ({islands.rejected[at]} rejected)" if islands.rejected[at] else ""
    return f"{islands.losses[at]:.3f}{rejected}"


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
        return [canvas.line((run.unread.get("plan.yaml", "no plan.yaml yet"), "dim"))]
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
    columns = [Column(head, cells, 9 - at, at == 0) for at, (head, cells) in enumerate(zip(heads, zip(*rows, strict=True), strict=True))]
    lines = table(columns, canvas)
    if not said.step_s:
        lines.append(canvas.line(("the plan has no forecast of times: nothing was measured for it", "dim")))
    why = [canvas.line((f"{name}: ", "dim"), reason) for name, reason in run.plan.reasons.items()]
    return [*lines, Text(), *([canvas.line("why this plan")] if why else []), *why]


def _time(seconds: float) -> str:
    return show_seconds(seconds) if seconds > 0 else "-"


def _memory(count: int) -> str:
    return show_gib(count) if count else "-"


def _share(error: float | None) -> str:
    return "-" if error is None else f"{100 * error:+.0f}%"


def events(run: WatchedRun, canvas: Canvas) -> list[Text]:
    """All that the records say beside steps, the newest last."""
    if not run.news:
        return [canvas.line(("nothing has happened yet", "dim"))]
    return [_news(news, canvas) for news in run.news]


def _news(news: News, canvas: Canvas) -> Text:
    clock = time.strftime("%H:%M:%S" if canvas.width >= 60 else "%H:%M", time.localtime(news.time_s))
    sign = {"warning": "!", "error": "x"}.get(news.level, " ")
    style = canvas.color(LEVELS.get(news.level, ""), "") if news.level != "info" else "dim"
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
        lines += [canvas.line(f"  {line}") for line in log.lines]
    if silent:
        said = "no rank" if len(silent) == run.ranks else "not rank " + ", ".join(map(str, silent))
        lines.append(canvas.line((f"{said} has written to a log here" if said == "no rank" else
                                  f"nothing in the logs of rank {', '.join(map(str, silent))}", "dim")))  # fmt: skip
    return lines or [canvas.line(("no logs yet", "dim"))]


PANES = (
    Pane("Run", overview),
    Pane("Ranks", ranks),
    Pane("Links", links),
    Pane("Forecast", forecast),
    Pane("Events", events, is_tail=True),
    Pane("Logs", logs, is_tail=True),
)


def tabs(at: int, canvas: Canvas) -> Text:
    """Return the line of the panes' names; the one that is shown is in brackets, and brighter."""
    parts: list[tuple[str, str]] = []
    for index, pane in enumerate(PANES):
        name = f"[{pane.name}]" if index == at else pane.name
        parts += [(name, "bold" if index == at else "dim"), (" " if canvas.width < 60 else "  ", "")]
    return canvas.line(*parts)
