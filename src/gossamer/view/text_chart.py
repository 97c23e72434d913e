"""Several curves on one axis in plain text: every curve is drawn with a letter of its own, and needs no color."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from gossamer.view.curve import Frame
from gossamer.view.format import show_count
from gossamer.view.screen import Screen

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_BOTH = "*"  # where curves cross
_WIDEST = 100  # columns of a chart on a screen without limit


@dataclass(frozen=True, slots=True)
class Line:
    """One curve: ascending `xs`, and `ys` of the same length; values that are not finite are not drawn."""

    xs: Sequence[float]
    ys: Sequence[float]


def text_chart(lines: Sequence[Line], screen: Screen, *, x_name: str, rows: int = 14) -> list[str]:
    """Draw the curves in `rows` lines and a frame; empty where no curve has a finite point.

    The first twentieth of the axis sets no scale: its fall would flatten all that follows. What leaves the frame there
    is not drawn.
    """
    if not (frame := _frame(lines, screen, rows)):
        return []
    cells = [[" "] * frame.columns for _ in range(frame.rows)]
    for letter, line in zip(LETTERS, lines, strict=False):
        for column, row in _places(line, frame):
            cells[row][column] = letter if cells[row][column] in (" ", letter) else _BOTH
    top, middle, bottom = (_number(y) for y in (frame.y_to, (frame.y_from + frame.y_to) / 2, frame.y_from))
    width = _label_width(frame.y_from, frame.y_to)
    labels = {0: top, frame.rows // 2: middle, frame.rows - 1: bottom}
    side, corner, floor = ("\u2502", "\u2514", "\u2500") if screen.is_unicode else ("|", "+", "-")
    drawn = [f"{labels.get(row, ''):>{width}} {side}{''.join(cells[row])}".rstrip() for row in range(frame.rows)]
    left, right = show_count(frame.x_from), f"{show_count(frame.x_to)} {x_name}"
    drawn.append(" " * (width + 1) + corner + floor * frame.columns)
    return [*drawn, " " * (width + 2) + left + right.rjust(max(len(right) + 1, frame.columns - len(left)))]


def _frame(lines: Sequence[Line], screen: Screen, rows: int) -> Frame | None:
    points = [(x, y) for line in lines for x, y in zip(line.xs, line.ys, strict=True) if math.isfinite(y)]
    if not points:
        return None
    x_from, x_to = min(x for x, _ in points), max(x for x, _ in points)
    settled = [y for x, y in points if x >= x_from + (x_to - x_from) / 20] or [y for _, y in points]
    low, high = min(settled), max(settled)
    columns = min(_WIDEST, screen.columns or _WIDEST) - _label_width(low, high) - 2
    if low == high:
        low, high = low - 0.5, high + 0.5
    return Frame(max(8, columns), rows, x_from, x_to, low, high)


def _places(line: Line, frame: Frame) -> list[tuple[int, int]]:
    """Return (column, row) of a curve, one for each column from its first point to its last, inside the frame."""
    sums: dict[int, list[float]] = {}
    for x, y in zip(line.xs, line.ys, strict=True):
        if math.isfinite(y):
            sums.setdefault(frame.cell(x, frame.y_from)[0], []).append(y)
    if not sums:
        return []
    known = sorted(sums)
    means = {column: sum(sums[column]) / len(sums[column]) for column in known}
    found = []
    for column in range(known[0], known[-1] + 1):
        after = known[bisect_left(known, column)]
        before = known[max(0, bisect_left(known, column) - (after != column))]
        part = (column - before) / (after - before) if after != before else 0.0
        y = means[before] + (means[after] - means[before]) * part
        if frame.y_from <= y <= frame.y_to:
            found.append((column, frame.cell(frame.x_from, y)[1]))
    return found


def _label_width(low: float, high: float) -> int:
    return max(len(_number(y)) for y in (low, (low + high) / 2, high, low - 0.5, high + 0.5))


def _number(value: float) -> str:
    return f"{value:.4g}"
