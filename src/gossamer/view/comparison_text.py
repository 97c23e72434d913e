"""The comparison of runs for people: warnings, what differs, a table, and the curves on one axis."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from textwrap import wrap

from gossamer.spec.units import show_bytes, show_seconds
from gossamer.view.comparison import Comparison, Figure
from gossamer.view.format import show_count, show_share
from gossamer.view.screen import Screen, cut, printable
from gossamer.view.text_chart import LETTERS, text_chart

_GAP = "  "
_WORDS = 100  # columns of running text, at most
_COUNTS = ("steps", "tokens")
_CELL = 40  # columns of a value in a table without limit


def comparison_text(found: Comparison, screen: Screen) -> str:
    """Return the comparison as text of at most `screen.columns` columns."""
    parts = [*_warnings(found, screen), "\n".join(_runs(found, screen)), *_differences(found, screen)]
    if found.at is not None:
        parts.append("\n".join(_figures(found, screen)))
    chart = text_chart(found.curves(), screen, x_name=found.axis)
    if chart:
        letters = ", ".join(LETTERS[: len(found.runs)])
        title = f"Training loss of {letters} (*: where they cross)"
        parts.append("\n".join([*_wrapped(title, screen), *chart]))
    return "\n\n".join(parts)


def _warnings(found: Comparison, screen: Screen) -> list[str]:
    lines = [line for said in found.warnings for line in _wrapped(f"! {printable(said)}", screen, indent="  ")]
    return ["\n".join(lines)] if lines else []


def _wrapped(text: str, screen: Screen, *, indent: str = "") -> list[str]:
    return wrap(text, min(_WORDS, screen.columns or _WORDS), subsequent_indent=indent)


def _runs(found: Comparison, screen: Screen) -> list[str]:
    lines = []
    for letter, run in zip(LETTERS, found.runs, strict=False):
        lines.append(cut(f"{letter}  {printable(run.name)}", screen.columns))
        said = (
            f"   {run.outcome} at step {run.summary['steps']}, {printable(str(run.summary['model'] or 'no model yet'))}"
        )
        lines.append(cut(said, screen.columns))
    return lines


def _differences(found: Comparison, screen: Screen) -> list[str]:
    if not found.differences:
        *first, last = found.compared or ("what is known of them",)
        return [f"Nothing differs in {', '.join(first)}{' and ' if first else ''}{last}."]
    parts = []
    for section, rows in groupby(found.differences, key=lambda one: one.section):
        cells = [(row.key, *(printable(value) for value in row.values)) for row in rows]
        parts.append("\n".join([f"Different {section}", *_table(cells, found, screen)]))
    return parts


def _figures(found: Comparison, screen: Screen) -> list[str]:
    where = f"At {found.axis[:-1]} {found.at:,}, the last that all have"
    if found.evaluated_at is None:
        where += "; no evaluation in common"
    elif found.evaluated_at != found.at:
        where += f"; evaluations at {found.evaluated_at:,}"
    rows = [
        (_label(figure), *_values(figure))
        for figure in found.figures
        if any(value is not None for value in figure.values)
    ]
    return [*_wrapped(where, screen), *_table(rows, found, screen)]


def _label(figure: Figure) -> str:
    return f"{figure.name}, {figure.unit}" if figure.unit not in ("", "bytes", "s", "share") else figure.name


def _values(figure: Figure) -> list[str]:
    """Return the texts of a figure: that of the first run, and of the others with their distance from it."""
    first = figure.values[0]
    shown = [_shown(first, figure)]
    for value in figure.values[1:]:
        text = _shown(value, figure)
        if value is not None and first and figure.unit != "share" and figure.name not in _COUNTS:
            text += f" ({_against(value / first)})"
        shown.append(text)
    return shown


def _against(ratio: float) -> str:
    """Return a ratio as a change in percent, or as a factor where it is large."""
    return f"{100 * (ratio - 1):+.1f}%" if 0.1 < ratio < 3 else f"x{ratio:.3g}"


def _shown(value: float | None, figure: Figure) -> str:
    if value is None:
        return "-"
    if figure.unit == "bytes":
        return show_bytes(value)
    if figure.unit == "s":
        return show_seconds(value)
    if figure.unit == "share":
        return show_share(value)
    if figure.unit == "tokens/s" or figure.name in _COUNTS:
        return f"{value:.0f}" if value < 100_000 else show_count(value)
    return f"{value:.4f}"


def _table(rows: Sequence[Sequence[str]], found: Comparison, screen: Screen) -> list[str]:
    """Return rows (name, a value per run) side by side where they fit, else a line per value."""
    head = ("", *LETTERS[: len(found.runs)])
    most = screen.columns or 10_000
    values = [[cut(cell, _CELL) for cell in row[1:]] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(head[1:], *values, strict=True)]
    name = max(len(row[0]) for row in rows)
    if len(_GAP) + name + sum(len(_GAP) + width for width in widths) > most:
        return [
            line
            for row in rows
            for line in (
                cut(f"{_GAP}{row[0]}", most),
                *(cut(f"{_GAP}{_GAP}{letter} {cell}", most) for letter, cell in zip(LETTERS, row[1:], strict=False)),
            )
        ]
    lines = []
    for label, cells in [("", head[1:]), *((row[0], cell) for row, cell in zip(rows, values, strict=True))]:
        shown = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        lines.append(f"{_GAP}{label:<{name}}{_GAP}{_GAP.join(shown)}".rstrip())
    return lines
