"""The terminal that lines are drawn for: its width, its characters, its colors."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.text import Text

GAP = 2  # columns between the columns of a table
LEAST = 6  # columns of a table's last column, below which another one is left out


@dataclass(frozen=True, slots=True)
class Glyphs:
    """The characters of a drawing."""

    done: str  # of a progress bar
    open: str
    mark: str  # an evaluation, in the loss curve
    cut: str  # the end of a text that was cut
    is_ascii: bool = False  # then a foreign character is shown as "?", and a curve is drawn in stars


UNICODE = Glyphs("\u2501", "\u2500", "\u25c6", "\u2026")
ASCII = Glyphs("#", "-", "o", "~", is_ascii=True)


@dataclass(frozen=True, slots=True)
class Canvas:
    """A terminal of `width` columns."""

    width: int
    glyphs: Glyphs = UNICODE
    has_color: bool = True

    def color(self, name: str, otherwise: str = "") -> str:
        """Return a style with the color `name`; `otherwise` on a terminal without colors."""
        return name if self.has_color else otherwise

    def words(self, text: str) -> str:
        """Return text on one line, with the characters that the terminal can show: a model may write anything."""
        shown = "".join(c if c.isprintable() else " " for c in text)
        return shown.encode("ascii", "replace").decode("ascii") if self.glyphs.is_ascii else shown

    def fit(self, text: str, width: int | None = None) -> str:
        """Return text cut to `width` columns (default: the canvas), with a sign that it was."""
        width = self.width if width is None else width
        text = self.words(text)
        if cell_len(text) <= width:
            return text
        return set_cell_size(text, max(0, width - 1)).rstrip() + self.glyphs.cut if width > 0 else ""

    def line(self, *parts: str | tuple[str, str]) -> Text:
        """Return one line of (text, style) parts, cut at the width of the canvas."""
        shown, room = Text(no_wrap=True), self.width
        for part in parts:
            text, style = (part, "") if isinstance(part, str) else part
            text = self.fit(text, room)
            shown.append(text, style)
            room -= cell_len(text)
        return shown

    def paragraph(self, start: tuple[str, str], text: str, style: str = "", *, indent: int = 2) -> list[Text]:
        """Return a start and a text on as many lines as they need; those after the first have an indent."""
        after = cell_len(start[0])
        text = self.words(text)
        pieces = textwrap.wrap(text, self.width, initial_indent=" " * after, subsequent_indent=" " * indent)
        if not pieces:
            return [self.line(start)]
        return [self.line(start, (pieces[0][after:], style)), *(self.line((piece, style)) for piece in pieces[1:])]

    def narrower(self, width: int) -> Canvas:
        """Return the same terminal with fewer columns."""
        return Canvas(width, self.glyphs, self.has_color)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table. `needed`: of columns that do not fit together, the one with the least goes first."""

    head: str
    cells: Sequence[str]
    needed: int = 0
    is_text: bool = False  # to the left; numbers to the right


def table(columns: Sequence[Column], canvas: Canvas) -> list[Text]:
    """Return a head and the rows of a table as wide as the canvas allows; the last column is cut, others left out."""
    kept = list(columns)
    while len(kept) > 1 and _width(kept[:-1]) + len(kept[:-1]) * GAP + _least(kept[-1]) > canvas.width:
        kept.remove(min(kept, key=lambda column: column.needed))
    widths = [_width([column]) for column in kept]
    lines = []
    for row, cells in enumerate([[c.head for c in kept], *zip(*(c.cells for c in kept), strict=True)]):
        shown = [
            canvas.words(cell).ljust(width) if column.is_text else canvas.words(cell).rjust(width)
            for cell, column, width in zip(cells, kept, widths, strict=True)
        ]
        lines.append(canvas.line(((" " * GAP).join(shown).rstrip(), "dim" if row == 0 else "")))
    return lines


def _least(column: Column) -> int:
    """Return the columns without which a last column says nothing."""
    return min(LEAST, _width([column])) if column.is_text else _width([column])


def _width(columns: Sequence[Column]) -> int:
    return sum(max(map(cell_len, [column.head, *column.cells])) for column in columns)
