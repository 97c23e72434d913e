"""A chart of a report: curves as inline SVG, their labels as text beside it, and the figures as a table behind it.

The SVG is stretched to the width of the page and has no text in it: labels stay as large as other text on any screen.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gossamer.view.format import show_count
from gossamer.view.report.blocks import Block, Table
from gossamer.view.report.escaping import html_text, markdown_code, markdown_text
from gossamer.view.report.thinning import Points
from gossamer.view.screen import Screen
from gossamer.view.text_chart import LETTERS, Line, text_chart

_WIDE, _HIGH = 1000, 300  # of the drawing, in its own units
_PARTS = 400  # of a curve, of which the extremes are kept
_MEANS = 160  # points of a line of means
_ROWS = 20  # of the table of figures
_FEW = 60  # points, each of which is drawn as a dot
_OUTLYING = 4.0  # the first twentieth sets the scale if it is not so many times as high as the rest


@dataclass(frozen=True, slots=True)
class Curve:
    """A curve of a chart, called `name`: all its points, those that are drawn, and its clear line.

    `spread` are few points with the extremes of all. The line is the means where the curve is noisy, else the spread.
    """

    name: str
    points: Points
    spread: Points
    line: Points

    @staticmethod
    def of(name: str, points: Points, *, is_noisy: bool = False) -> Curve:
        """Return the curve through `points`; a noisy one is drawn faintly, under the line of its means."""
        spread = points.extremes(_PARTS)
        return Curve(name, points, spread, points.means(_MEANS) if is_noisy else spread)

    def at(self, x: float) -> float | None:
        """Return the value at `x`; None where the curve has no point there."""
        place = bisect_left(self.points.xs, x)
        return self.points.ys[place] if place < len(self.points) and self.points.xs[place] == x else None


@dataclass(frozen=True, slots=True)
class Chart(Block):
    """Curves over the steps of a run, in one unit; `show` writes a value of it. At least one curve has a point."""

    title: str
    unit: str
    curves: Sequence[Curve]
    show: Callable[[float], str]
    remark: str = ""
    from_zero: bool = False

    def html(self) -> str:
        scale = _Scale.of(self)
        paths = "".join(
            _paths(curve, scale, number) for number, curve in enumerate(self.curves, 1) if len(curve.points)
        )
        said = html_text(self._described())
        drawing = (
            f'<svg viewBox="0 0 {_WIDE} {_HIGH}" preserveAspectRatio="none" role="img" aria-label="{said}">'
            f"{scale.grid()}{paths}</svg>"
        )
        remark = f'<p class="remark">{html_text(text)}</p>' if (text := self._remarks(scale)) else ""
        return (
            f'<figure class="chart"><figcaption>{html_text(self.title)}'
            f' <span class="unit">{html_text(self.unit)}</span></figcaption>{self._legend()}'
            f'<div class="frame">{scale.y_labels(self.show)}<div class="drawing">{drawing}</div>'
            f"{scale.x_labels()}</div>{remark}"
            f"<details><summary>Figures of this chart</summary>{self._table().html()}</details></figure>"
        )

    def markdown(self) -> str:
        lines = [Line(curve.line.xs, curve.line.ys) for curve in self.curves]
        drawn = "\n".join(text_chart(lines, Screen(84), x_name="steps"))
        named = ", ".join(f"{letter} {curve.name}" for letter, curve in zip(LETTERS, self.curves, strict=False))
        more = [markdown_text(text) for text in (self.unit, named if len(self.curves) > 1 else "") if text]
        head = f"**{markdown_text(self.title)}**" + (f" ({'; '.join(more)})" if more else "")
        return "\n\n".join(filter(None, [head, markdown_code(drawn), markdown_text(self.remark)]))

    def _legend(self) -> str:
        keys = "".join(
            f'<li><span class="key c{number}"></span>{html_text(curve.name)}</li>'
            for number, curve in enumerate(self.curves, 1)
        )
        return f'<ul class="legend">{keys}</ul>' if len(self.curves) > 1 else ""

    def _remarks(self, scale: _Scale) -> str:
        above = f"The first steps, up to {self.show(scale.highest)}, are above the frame." if scale.is_cut else ""
        return " ".join(filter(None, [self.remark, above]))

    def _described(self) -> str:
        told = []
        for curve in self.curves:
            if ys := curve.spread.ys:
                low, high = self.show(min(ys)), self.show(max(ys))
                told.append(f"{curve.name} from {self.show(ys[0])} to {self.show(ys[-1])}, least {low}, most {high}")
        return f"{self.title}{f' in {self.unit}' if self.unit else ''}, over steps. {'; '.join(told)}."

    def _table(self) -> Table:
        """Return at most so many rows as a person reads: the curves at steps at equal distances."""
        longest = max((curve.points for curve in self.curves), key=len)
        every = max(1, math.ceil(len(longest) / _ROWS))
        steps = [*longest.xs[::every], *([longest.xs[-1]] if (len(longest) - 1) % every else [])]
        values = [[curve.at(step) for curve in self.curves] for step in steps]
        rows = [
            (f"{step:.0f}", *("" if value is None else self.show(value) for value in row))
            for step, row in zip(steps, values, strict=True)
        ]
        return Table(f"{self.title}, figures", ("step", *(curve.name for curve in self.curves)), rows, figures_from=0)


@dataclass(frozen=True, slots=True)
class _Scale:
    """The window of a chart: [x_from, x_to] x [y_from, y_to], with its ticks. `highest`: of all its points."""

    x_from: float
    x_to: float
    y_from: float
    y_to: float
    highest: float
    is_cut: bool

    @staticmethod
    def of(chart: Chart) -> _Scale:
        points = [(x, y) for curve in chart.curves for x, y in zip(curve.spread.xs, curve.spread.ys, strict=True)]
        x_from, x_to = min(x for x, _ in points), max(x for x, _ in points)
        low, high = min(y for _, y in points), max(y for _, y in points)
        settled = [y for x, y in points if x >= x_from + (x_to - x_from) / 20] or [y for _, y in points]
        rest = max(settled) - min(settled)
        is_cut = rest > 0 and high > max(settled) and high - low > _OUTLYING * rest
        top = max(settled) + rest / 2 if is_cut else high
        bottom = min(0.0, low) if chart.from_zero else low
        if top <= bottom:
            top, bottom = bottom + (abs(bottom) or 1.0) / 2, bottom - (0.0 if chart.from_zero else abs(bottom) / 2)
        space = (top - bottom) / 20
        return _Scale(x_from, x_to, bottom - (0 if bottom == 0 else space), top + space, high, is_cut)

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Return a point in the units of the drawing."""
        across = (x - self.x_from) / (self.x_to - self.x_from) if self.x_to > self.x_from else 0.5
        up = (y - self.y_from) / (self.y_to - self.y_from)
        return across * _WIDE, (1 - up) * _HIGH

    def grid(self) -> str:
        lines = "".join(f"M0 {self.at(0, y)[1]:.1f}H{_WIDE}" for y in _ticks(self.y_from, self.y_to, 5))
        return f'<path class="grid" d="{lines}"/>' if lines else ""

    def y_labels(self, show: Callable[[float], str]) -> str:
        ticks = _ticks(self.y_from, self.y_to, 5)
        texts = [show(y) for y in ticks]
        if len(set(texts)) < len(texts):  # a flat curve: the usual digits do not tell its ticks apart
            texts = [f"{y:.7g}" for y in ticks]
        inner = "".join(
            f'<span style="top:{self.at(0, y)[1] / _HIGH:.2%}">{html_text(text)}</span>'
            for y, text in zip(ticks, texts, strict=True)
        )
        return f'<div class="ys" aria-hidden="true">{inner}</div>'

    def x_labels(self) -> str:
        ticks = [x for x in _ticks(self.x_from, self.x_to, 5) if x == int(x)] or [self.x_from]
        inner = "".join(
            f'<span style="left:{self.at(x, self.y_from)[0] / _WIDE:.2%}">{show_count(x)}</span>' for x in ticks
        )
        return f'<div class="xs" aria-hidden="true">{inner}</div>'


def _ticks(low: float, high: float, count: int) -> list[float]:
    """Return round numbers within [low, high], about `count` of them: multiples of 1, 2 or 5 times a power of ten."""
    if high <= low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    distance = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first = math.ceil(low / distance)
    return [number * distance for number in range(first, math.floor(high / distance) + 1)]


def _paths(curve: Curve, scale: _Scale, number: int) -> str:
    found = ""
    line = curve.line
    if len(line) < len(curve.spread):
        found += f'<path class="noise c{number}" d="{_path(curve.spread, scale)}"/>'
    found += f'<path class="line c{number}" d="{_path(line, scale)}"/>'
    if len(line) <= _FEW:  # a stroke without length and with round ends is a dot, however the drawing is stretched
        dots = "".join(
            f"M{x:.1f} {y:.1f}h0" for x, y in (scale.at(*point) for point in zip(line.xs, line.ys, strict=True))
        )
        found += f'<path class="dots c{number}" d="{dots}"/>'
    return found


def _path(points: Points, scale: _Scale) -> str:
    places = [scale.at(x, y) for x, y in zip(points.xs, points.ys, strict=True)]
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
