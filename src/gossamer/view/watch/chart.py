"""The loss curve of a watched run as lines of text: braille dots, or stars where the terminal has ASCII only."""

from __future__ import annotations

from rich.text import Text

from gossamer.spec.records import Evaluation
from gossamer.view.curve import Curve, Frame, draw
from gossamer.view.format import ACCENT, SECOND
from gossamer.view.watch.canvas import Canvas

LEAST_COLUMNS = 16
LEAST_ROWS = 3
APART = 5  # columns from one mark to the next, at least


def chart(losses: Curve, evaluations: list[Evaluation], canvas: Canvas, *, rows: int) -> list[Text]:
    """Draw the training loss as a line and the evaluations as marks in `rows` lines, the last one the axis of steps.

    Empty where there are fewer than two points, or too little room.
    """
    curve = losses.settled()
    if len(curve.xs) < 2:
        return []
    marks = [(float(e.step), e.loss) for e in evaluations if e.step >= curve.xs[0]]
    values = [*curve.ys, *(loss for _, loss in marks)]
    top, bottom = f"{max(values):.2f}", f"{min(values):.2f}"
    margin = max(len(top), len(bottom)) + 1
    if canvas.width - margin < LEAST_COLUMNS or rows - 1 < LEAST_ROWS:
        return []
    frame = Frame(canvas.width - margin, rows - 1, curve.xs[0], curve.xs[-1], min(values), max(values))
    cells = [list(line) for line in (_stars if canvas.glyphs.is_ascii else draw)(curve, frame)]
    marked = _apart([frame.cell(x, y) for x, y in marks])
    for column, row in marked:
        cells[row][column] = canvas.glyphs.mark
    labels = [top, *[""] * (len(cells) - 2), bottom]
    lines = [
        Text.assemble((f"{label:>{margin - 1}} ", "dim"), ("".join(line), canvas.color(ACCENT)), no_wrap=True)
        for label, line in zip(labels, cells, strict=True)
    ]
    for column, row in marked:
        lines[row].stylize(canvas.color(SECOND, "bold"), margin + column, margin + column + 1)
    first, last = f"{curve.xs[0]:,.0f}", f"loss by step {curve.xs[-1]:,.0f}"
    axis = " " * margin + first + last.rjust(frame.columns - len(first))
    return [*lines, canvas.line((axis, "dim"))]


def _apart(marked: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the marks, from the last one on, that leave room for the line between them."""
    kept: list[tuple[int, int]] = []
    for column, row in reversed(marked):
        if not kept or kept[-1][0] - column >= APART:
            kept.append((column, row))
    return kept


def _stars(curve: Curve, frame: Frame) -> list[str]:
    """Draw the curve in ASCII: a star in each column at the mean of its points, bars where it jumps over rows."""
    cells = [[" "] * frame.columns for _ in range(frame.rows)]
    heights: dict[int, list[float]] = {}
    for x, y in zip(curve.xs, curve.ys, strict=True):
        heights.setdefault(frame.cell(x, y)[0], []).append(y)
    before: int | None = None
    for column, found in sorted(heights.items()):
        row = frame.cell(frame.x_from, sum(found) / len(found))[1]
        for between in range(min(row, before) + 1, max(row, before)) if before is not None else ():
            cells[between][column] = "|"
        cells[row][column] = "*"
        before = row
    return ["".join(line) for line in cells]
