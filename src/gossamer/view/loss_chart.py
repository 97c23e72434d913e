"""The chart of a run as an SVG picture: training losses as a line, evaluations of the first validation set as dots."""

from __future__ import annotations

import math
from html import escape

from gossamer.view.format import format_evaluation, set_name
from gossamer.view.progress import RunProgress

WIDTH, HEIGHT = 640, 240  # of the picture, in its own units
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 34, 26
_LINE, _DOT, _TEXT = "#2a8ca8", "#875fd7", "#808080"  # readable on a white and on a black ground


def chart(progress: RunProgress, *, title: str = "") -> str:
    """Return the picture of a run so far; without a step it holds the title alone. Steps to the right, loss upwards."""
    curve = progress.losses.settled()
    points = [(x, y) for x, y in zip(curve.xs, curve.ys, strict=True) if math.isfinite(y)]
    dots = [(float(one.step), one.loss) for one in progress.evaluations if math.isfinite(one.loss)]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" '
        f'font-family="monospace" font-size="12"><title>{escape(title or "loss of the run")}</title>',
        _text(8, 18, _heading(progress, title)),
    ]
    if points or dots:
        parts += _drawn(points, dots, last=float(max(progress.steps, 1)))
    return "\n".join([*parts, "</svg>"])


def _heading(progress: RunProgress, title: str) -> str:
    words = [title, f"step {progress.steps_done}/{progress.steps}"]
    if (loss := progress.pace.loss) is not None:
        words.append(f"loss {loss:.4f}")
    if progress.evaluations:
        last = progress.evaluations[-1]
        words.append(f"validation{set_name(last)} {format_evaluation(last)}")
    if progress.end is not None:
        words.append(progress.end.outcome)
    return ", ".join(filter(None, words))


def _drawn(points: list[tuple[float, float]], dots: list[tuple[float, float]], *, last: float) -> list[str]:
    values = [y for _, y in (*points, *dots)]
    low, high = min(values), max(values)
    span = high - low or 1.0
    last = max([last, *(x for x, _ in (*points, *dots))])

    def place(x: float, y: float) -> tuple[float, float]:
        across = _LEFT + (WIDTH - _LEFT - _RIGHT) * x / last
        return round(across, 1), round(_TOP + (HEIGHT - _TOP - _BOTTOM) * (high - y) / span, 1)

    bottom = HEIGHT - _BOTTOM
    parts = [
        f'<path d="M{_LEFT} {_TOP}V{bottom}H{WIDTH - _RIGHT}" fill="none" stroke="{_TEXT}"/>',
        _text(4, _TOP + 10, f"{high:.3g}"),
        _text(4, bottom, f"{low:.3g}"),
        _text(_LEFT, HEIGHT - 8, "0"),
        _text(WIDTH - _RIGHT, HEIGHT - 8, f"{last:.0f} steps", anchor="end"),
    ]
    if points:
        line = " ".join(f"{x},{y}" for x, y in (place(*point) for point in points))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{_LINE}" stroke-width="1.5"/>')
    for dot in dots:
        x, y = place(*dot)
        parts.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{_DOT}"/>')
    return parts


def _text(x: float, y: float, words: str, *, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" fill="{_TEXT}" text-anchor="{anchor}">{escape(words)}</text>'
