"""The panel of the live display: the state of a run on one screen, 80 columns or more."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gossamer.spec.records import Start
from gossamer.spec.units import show_bytes, show_gib, show_rate, show_seconds
from gossamer.view.curve import Frame, draw
from gossamer.view.format import (
    ACCENT,
    BAD,
    GOOD,
    LEVELS,
    SECOND,
    WARN,
    format_event,
    format_sample,
    loss_and_bits,
    model_words,
    saved_words,
    setting_words,
    show_count,
    show_share,
)
from gossamer.view.progress import RunProgress

WIDEST = 110  # a wider terminal gains nothing
LINKS = 3  # shown
EVENTS = 3
LABELS = 11  # columns
FIGURES = 37  # columns of labels and values together

PanelRow = tuple[str, Text]


def panel(
    progress: RunProgress, *, width: int, height: int, now_s: float, opened_s: float | None = None, title: str = ""
) -> RenderableType:
    """Draw the state of a run as one renderable of at most `width` x `height` characters (20 lines at most).

    `opened_s`: when the display was opened, for the time that a start takes; None: not shown.
    """
    inner = min(width, WIDEST) - 4
    rows = _figures(progress)
    events = _news(progress, inner)
    parts: list[RenderableType] = [*_header(progress, inner, now_s=now_s, opened_s=opened_s)]
    room = height - len(parts) - 4 - len(events)  # 2 borders, a blank line, the cursor's
    rows = rows[: max(3, room)]
    beside = inner - FIGURES - 2
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(width=FIGURES)
    cells: list[RenderableType] = [_grid(rows)]
    if beside >= 24:
        table.add_column(width=beside)
        cells.append(_plot(progress, columns=beside, rows=len(rows)))
    table.add_row(*cells)
    parts += [Text(), table, *events] if rows else events
    return Panel(
        Group(*parts),
        title=Text(model_words(progress.start) if progress.start else "gossamer", style="bold", overflow="ellipsis"),
        subtitle=Text(title, style="dim default", overflow="ellipsis") if title else None,
        title_align="left",
        subtitle_align="right",
        box=box.ROUNDED,
        border_style=_border(progress),
        width=inner + 4,
        padding=(0, 1),
    )


def _border(progress: RunProgress) -> str:
    if progress.end is None:
        return ACCENT
    return {"done": GOOD, "interrupted": WARN}.get(progress.end.outcome, BAD)


def _header(progress: RunProgress, width: int, *, now_s: float, opened_s: float | None) -> list[RenderableType]:
    start = progress.start
    if start is None:
        spent = f"  {show_seconds(max(1, round(now_s - opened_s)))}" if opened_s is not None else ""
        return [Text(f"starting: processes, data, model{spent}", style="dim")]
    tokens = f"{show_count(start.tokens_per_step)} tokens a step"
    about = Text(f"{setting_words(start)}, {tokens}", style="dim", no_wrap=True, overflow="ellipsis")
    count = f"step {progress.steps_done:,} / {progress.steps:,}"
    after = f"{show_share(progress.fraction)}  {_clock(progress, start, now_s)}"
    room = width - len(count) - len(after) - 2
    if room < 8:
        return [about, Text.assemble((count, "bold"), f" {after}", no_wrap=True, overflow="ellipsis")]
    total, done = max(1, progress.steps), progress.steps_done
    stroke = ProgressBar(
        total=total, completed=done, width=room, complete_style=ACCENT, finished_style=GOOD, style="dim"
    )
    bar = Table.grid(padding=(0, 1, 0, 0))
    bar.add_row(Text(count, style="bold"), stroke, Text(after))
    return [about, bar]


def _clock(progress: RunProgress, start: Start, now_s: float) -> str:
    end = progress.end
    if end is not None:
        return f"{end.outcome} in {show_seconds(round(end.seconds or end.time_s - start.time_s))}"
    spent = show_seconds(max(1, round(now_s - start.time_s)))
    left = progress.remaining_s
    return f"{spent}, {show_seconds(max(1, round(left)))} left" if left else spent


def _figures(progress: RunProgress) -> list[PanelRow]:
    """Return label and value of the known figures, the most important first: a low terminal shows fewer."""
    rows: list[PanelRow] = []
    step = progress.step
    if (loss := progress.pace.loss) is not None:
        unit = progress.start.loss_unit if progress.start is not None else ""
        rows.append(("loss", _value(f"{loss:.4f}", unit, style=f"bold {ACCENT}")))
    if progress.evaluations:
        evaluation = progress.evaluations[-1]
        rows.append(
            (
                "validation" if not progress.other_sets else evaluation.name[:10],
                _value(*loss_and_bits(evaluation), style=f"bold {SECOND}"),
            )
        )
    rows += [(name[:10], _value(*loss_and_bits(one))) for name, one in progress.other_sets.items()]
    if (best := progress.best) is not None:
        rows.append(("best", _value(f"{best.value:.4f}", f"{best.name} {best.figure} at {best.step:,}")))
    if (rate := progress.pace.tokens_per_s) is not None and progress.pace.step_s is not None:
        rows.append(("tokens/s", _value(show_count(rate), f"{show_seconds(progress.pace.step_s)} a step")))
    if (share := progress.of_peak) is not None:
        rows.append(("arithmetic", _value(show_share(share), "of measured peak")))
    rows += _wire(progress)
    if progress.peak_bytes:
        rows.append(("memory", _value(show_gib(progress.peak_bytes), "peak, first rank")))
    if step is not None:
        rows.append(("learn rate", _value(f"{step.lr:.2e}")))
        rows.append(("gradient", _value(f"{step.grad_norm:.3g}", "norm")))
    if progress.rejected:
        rows.append(("rejected", _value(f"{progress.rejected:,}", "steps", style=WARN)))
    rows += _saved(progress)
    return rows


def _wire(progress: RunProgress) -> list[PanelRow]:
    links = sorted(progress.pace.link_bytes.items(), key=lambda item: -item[1][0])
    rows = [
        (f"link {link}"[:LABELS], _value(f"{show_bytes(per_step)}/step", show_rate(per_s)))
        for link, (per_step, per_s) in links[:LINKS]
    ]
    if len(links) > LINKS:
        rows.append(("", Text(f"and {len(links) - LINKS} more links", style="dim")))
    if links and (exposed := progress.pace.exposed_share) is not None:
        rows.append(("exposed", _value(show_share(exposed), "of the step waits", style=WARN if exposed > 0.25 else "")))
    return rows


def _saved(progress: RunProgress) -> list[PanelRow]:
    if progress.saves.failed is not None:
        return [("checkpoint", Text(saved_words(progress.saves.failed), style=BAD))]
    return [("checkpoint", _value(saved_words(progress.saves.saved)))] if progress.saves.saved is not None else []


def _value(value: str, note: str = "", *, style: str = "") -> Text:
    text = Text(value, style=style)
    return text.append(f"  {note}", style="not bold dim default") if note else text


def _grid(rows: list[PanelRow]) -> Table:
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(width=LABELS, style="dim", no_wrap=True)
    table.add_column(width=FIGURES - LABELS - 1, no_wrap=True, overflow="ellipsis")
    for label, value in rows:
        table.add_row(label, value)
    return table


def _plot(progress: RunProgress, *, columns: int, rows: int) -> RenderableType:
    """Draw the training loss as a line, evaluations as diamonds, the axes labeled at their ends."""
    curve = progress.losses.settled()
    if len(curve.xs) < 2 or rows < 4:
        return Text()
    marks = [(float(e.step), e.loss) for e in progress.evaluations if e.step >= curve.xs[0]]
    values = [*curve.ys, *(loss for _, loss in marks)]
    top, bottom = f"{max(values):.2f}", f"{min(values):.2f}"
    margin = max(len(top), len(bottom)) + 1
    frame = Frame(columns - margin, rows - 1, curve.xs[0], curve.xs[-1], min(values), max(values))
    cells = [list(line) for line in draw(curve, frame)]
    marked = [frame.cell(x, y) for x, y in marks]
    for column, row in marked:
        cells[row][column] = "\u25c6"
    labels = [top, *[""] * (len(cells) - 2), bottom]
    lines = [
        Text.assemble((f"{label:>{margin - 1}} ", "dim"), ("".join(line), ACCENT), no_wrap=True)
        for label, line in zip(labels, cells, strict=True)
    ]
    for column, row in marked:
        lines[row].stylize(SECOND, margin + column, margin + column + 1)
    first, last = f"{curve.xs[0]:,.0f}", f"{curve.xs[-1]:,.0f}"
    axis = " " * margin + first + f"loss by step {last}".rjust(frame.columns - len(first))
    return Group(*lines, Text(axis, style="dim", no_wrap=True))


def _news(progress: RunProgress, width: int) -> list[RenderableType]:
    """Return the latest messages of the run: a generated sample, the newest events, and the reason of a failure."""
    lines: list[RenderableType] = []
    if progress.sample is not None:
        words = format_sample(progress.sample, width - LABELS - 1)
        lines.append(
            Text.assemble((f"{'sample':<{LABELS}} ", "dim"), (words, "italic"), no_wrap=True, overflow="ellipsis")
        )
    if progress.proof is not None and progress.step is None:
        lines.append(_said("info", f"proof: {progress.proof.message}"))
    lines += [_said(event.level, format_event(event)) for event in list(progress.events)[-EVENTS:]]
    if progress.end is not None and progress.end.message:
        lines.append(_said("error" if progress.end.outcome == "failed" else "info", progress.end.message))
    return lines


def _said(level: str, words: str) -> Text:
    mark = {"warning": "!", "error": "x"}.get(level, "-")
    line = " ".join(words.split())
    return Text.assemble((f"{mark} ", f"bold {LEVELS.get(level, ACCENT)}"), line, no_wrap=True, overflow="ellipsis")
