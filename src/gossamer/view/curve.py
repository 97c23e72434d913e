"""A loss curve of any length in bounded memory, and its drawing in braille dots (2 x 4 per character)."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import pairwise

POINTS = 1024  # kept, at most: more than a terminal has columns
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # of one braille character: [column][row from the top]
_BLANK = 0x2800


@dataclass(slots=True)
class Curve:
    """A curve of points (x, y) with growing x in bounded memory.

    When full, neighbors are averaged, so old and new parts stay comparable.
    """

    xs: list[float] = field(default_factory=list)
    ys: list[float] = field(default_factory=list)
    _every: int = 1  # steps averaged into one point
    _sum: float = 0.0
    _count: int = 0

    def add(self, x: float, y: float) -> None:
        """Append a point; when the curve is full, average pairs of neighbors."""
        self._sum, self._count = self._sum + y, self._count + 1
        if self._count < self._every:
            return
        self.xs.append(x)
        self.ys.append(self._sum / self._count)
        self._sum, self._count = 0.0, 0
        if len(self.xs) == POINTS:
            self.xs = self.xs[1::2]
            self.ys = [(a + b) / 2 for a, b in zip(self.ys[::2], self.ys[1::2], strict=True)]
            self._every *= 2

    def settled(self) -> Curve:
        """Return the curve without its first twentieth, whose fall would flatten the drawing of the rest."""
        first = len(self.xs) // 20
        return Curve(self.xs[first:], self.ys[first:])

    def forget_after(self, x: float) -> None:
        """Drop the points beyond `x`: a resumed run makes them again."""
        keep = bisect_right(self.xs, x)
        del self.xs[keep:], self.ys[keep:]
        self._sum, self._count = 0.0, 0


@dataclass(frozen=True, slots=True)
class Frame:
    """The window of a curve's drawing: `columns` x `rows` characters for [x_from, x_to] x [y_from, y_to]."""

    columns: int
    rows: int
    x_from: float
    x_to: float
    y_from: float
    y_to: float

    def cell(self, x: float, y: float, *, per_column: int = 1, per_row: int = 1) -> tuple[int, int]:
        """Return (column, row from the top) of a point, in characters or in the finer dots; clipped to the frame."""
        columns, rows = self.columns * per_column, self.rows * per_row
        across = (x - self.x_from) / (self.x_to - self.x_from or 1.0)
        up = (y - self.y_from) / (self.y_to - self.y_from or 1.0)
        return (
            min(columns - 1, max(0, int(across * columns))),
            min(rows - 1, max(0, rows - 1 - int(up * rows))),
        )


def draw(curve: Curve, frame: Frame) -> list[str]:
    """Draw the curve as `frame.rows` strings of `frame.columns` characters.

    It draws the mean of each dot column, joined by vertical strokes.
    """
    cells = [[0] * frame.columns for _ in range(frame.rows)]
    before: int | None = None
    for column, row in _dots(curve, frame):
        top, bottom = (row, row) if before is None else (min(before, row), max(before, row))
        for y in range(top + (top < row), bottom + (bottom == row)):
            cells[y // 4][column // 2] |= _DOTS[column % 2][y % 4]
        before = row
    return ["".join(chr(_BLANK + dots) for dots in line) for line in cells]


def _dots(curve: Curve, frame: Frame) -> list[tuple[int, int]]:
    """Return (column, row) for every dot column from the first to the last point, interpolated where needed."""
    heights: dict[int, list[int]] = {}
    for x, y in zip(curve.xs, curve.ys, strict=True):
        column, row = frame.cell(x, y, per_column=2, per_row=4)
        heights.setdefault(column, []).append(row)
    known = [(column, sum(rows) / len(rows)) for column, rows in sorted(heights.items())]
    dots = [(column, round(row)) for column, row in known[:1]]
    for (left, from_row), (right, to_row) in pairwise(known):
        slope = (to_row - from_row) / (right - left)
        dots += [(left + i, round(from_row + slope * i)) for i in range(1, right - left + 1)]
    return dots
