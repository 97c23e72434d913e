"""The first pane: the figures that a run is judged by, its loss curve, and the newest events."""

from __future__ import annotations

from rich.text import Text

from gossamer.spec.units import show_bytes, show_gib, show_rate, show_seconds
from gossamer.view.format import (
    ACCENT,
    BAD,
    SECOND,
    WARN,
    loss_and_bits,
    model_words,
    saved_words,
    setting_words,
    show_count,
    show_share,
)
from gossamer.view.watch.canvas import Canvas
from gossamer.view.watch.chart import chart
from gossamer.view.watch.events_pane import headline
from gossamer.view.watch.watched_run import WatchedRun

BESIDE = 76  # columns from which the curve stands beside the figures
FIGURES = 38  # columns of the figures there
LABEL = 11
NEWEST = 4  # events in the first pane
CHART_ROWS = 10


def overview(run: WatchedRun, canvas: Canvas) -> list[Text]:
    """The figures that a run is judged by, its loss curve, and the newest events."""
    start = run.progress.start
    lines: list[Text] = []
    if start is not None:
        step = ", ".join([f"{show_count(start.tokens_per_step)} tokens a step", *filter(None, [start.precision])])
        lines += [canvas.line((words, "dim")) for words in (model_words(start), setting_words(start), step)]
    lines += _trouble(run, canvas)
    figures = _figures(run, canvas.narrower(FIGURES) if canvas.width >= BESIDE else canvas)
    curve = run.progress.losses, run.progress.evaluations
    if canvas.width >= BESIDE:
        drawn = chart(*curve, canvas.narrower(canvas.width - FIGURES - 2), rows=max(CHART_ROWS, len(figures)))
        lines += [Text(), *_beside(figures, drawn)]
    else:
        drawn = chart(*curve, canvas, rows=CHART_ROWS)
        lines += [Text(), *figures, *([Text(), *drawn] if drawn else [])]
    newest = [news for news in run.news if news.word not in ("start", "")][-NEWEST:]
    said = [headline(news, canvas) for news in newest]
    return [*lines, *([Text(), *said] if said else [])]


def _trouble(run: WatchedRun, canvas: Canvas) -> list[Text]:
    """Why a run is not what it should be: how it ended, and files of it that cannot be read."""
    state = run.state
    lines: list[Text] = []
    if state.word in ("failed", "crashed", "silent") and state.why:
        lines += canvas.paragraph((f"{state.word}: ", canvas.color(BAD, "bold")), state.why)
    for said in run.unread.values():
        lines += canvas.paragraph(("! ", canvas.color(WARN, "bold")), said)
    return lines


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
        label = last.name[:LABEL] if progress.other_sets else "validation"
        row(label, *loss_and_bits(last), f"bold {canvas.color(SECOND)}".strip())
    for name, one in progress.other_sets.items():
        row(name[:LABEL], *loss_and_bits(one))
    if (best := progress.best) is not None:
        row("best", f"{best.value:.4f}", f"{best.name} {best.figure} at {best.step:,}")
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
